"""Limits of number formats, for packages that do not import torch."""

LARGEST_FLOAT32 = 3.4e38
"""Largest number of float32, 3.4028e38, rounded down; rewards are tensors of float32."""
