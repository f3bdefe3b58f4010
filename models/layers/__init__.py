"""Layers that families share. Each declares its `role`, which is all that a parallel plan needs to know of it."""
