"""Memory that grows without being used, where every batch has another shape.

glibc gives back what is free at its heap's end alone, and so many tensors of so many sizes leave holes before it. And
oneDNN, which multiplies matrices in bfloat16 on a CPU, keeps what it made ready for each shape that it met, a thousand
of them, some half a mebibyte each, and PyTorch as many again for each thread.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from pathlib import Path

# A process may hold so much more than after the last time, before its holes are given back again. Looking takes some
# microseconds, giving back some tens of milliseconds, and as long again until the pages have been provided anew.
GROWTH, LEAST_BYTES = 1.25, 64 << 20
# Products that are kept ready: those of some six shapes of batches, forward, backward and of the head.
KEPT_READY = 128

# What may be held now, and whose work has just seen its holes given back.
_allowed = 0.0
_given_back_by: str | None = None


def bound_kernel_caches() -> None:
    """Have oneDNN and PyTorch keep `KEPT_READY` products ready, unless the environment says otherwise; both look when
    they are first used."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KEPT_READY))


def give_back(work: str) -> bool:
    """Give the heap's free pages back to the system, if this process has grown by a quarter since it last did.

    Called after a step of `work`; does nothing where the C library cannot. What a step itself needs is no growth: the
    one that follows the last giving back, before any other work, says how much that is. Returns whether it was done.
    """
    global _allowed, _given_back_by
    trim = _malloc_trim()
    if trim is None:
        return False
    held, follows, _given_back_by = _resident_bytes(), _given_back_by == work, None
    if follows:
        _allowed = max(_allowed, _with_growth(held))
    if held <= _allowed:
        return False
    trim(0)
    _allowed, _given_back_by = _with_growth(_resident_bytes()), work
    return True


def _with_growth(held: int) -> float:
    return GROWTH * held + LEAST_BYTES


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's, on Linux; None elsewhere."""
    try:
        _resident_bytes()
        function = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_size_t,)
    function.restype = ctypes.c_int
    return function
