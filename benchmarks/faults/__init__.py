"""Fault injection into RL on inference servers with real processes, and a check of the trained tokens."""
