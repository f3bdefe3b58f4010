"""Contracts of model families; `archon check-model` runs them on any registered family."""
