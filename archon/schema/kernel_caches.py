"""Limits of the kernel caches of oneDNN and PyTorch; set before either is loaded."""

from __future__ import annotations

import os

# Enough for about six batch shapes: matmuls of forward, backward and head.
MAX_CACHED_KERNELS = 128


def limit_kernel_caches() -> None:
    """Limit both caches to `MAX_CACHED_KERNELS`, unless the environment sets other limits."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(MAX_CACHED_KERNELS))
