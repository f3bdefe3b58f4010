"""Attention of decoding: paged key-value caches and recurrent states."""
