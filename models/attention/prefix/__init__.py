"""Attention over shared prefixes."""
