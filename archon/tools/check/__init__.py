"""Contracts that every model family must fulfill, runnable on any registered family: `archon check-model`."""
