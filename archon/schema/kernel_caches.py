"""How much oneDNN and PyTorch keep ready for products of matrices, set before either is loaded."""

from __future__ import annotations

import os

# Products that are kept ready: those of some six shapes of batches, forward, backward and of the head.
KEPT_READY = 128


def bound_kernel_caches() -> None:
    """Have oneDNN and PyTorch keep `KEPT_READY` products ready, unless the environment says otherwise; both look when
    they are first used."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KEPT_READY))
