"""Megatron-core's rank files: which layouts they can hold, and reading and writing them."""
