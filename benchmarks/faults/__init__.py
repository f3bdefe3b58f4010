"""Faults of a run of RL on inference servers: real processes, harm that is done to them, and what was then trained."""
