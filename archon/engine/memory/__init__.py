"""Predicted memory of a training step, and the blocks that recompute to fit it."""
