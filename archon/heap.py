"""Free memory that the C library keeps: steps on batches of ever other shapes leave its heap full of holes.

glibc gives back what is free at the heap's end alone. Where every batch has another shape, the holes of a day are
several times what a step needs.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from pathlib import Path

# A process may hold so much more than after the last time, before its holes are given back again. Looking takes some
# microseconds, giving back some tens of milliseconds, and as long again until the pages have been provided anew.
GROWTH, LEAST_BYTES = 1.25, 64 << 20

_allowed = 0.0


def give_back() -> bool:
    """Give the heap's free pages back to the system, if this process has grown by a quarter since it last did.

    Called after a step; does nothing where the C library cannot. Returns whether it was done.
    """
    global _allowed
    trim = _malloc_trim()
    if trim is None or _resident_bytes() <= _allowed:
        return False
    trim(0)
    _allowed = GROWTH * _resident_bytes() + LEAST_BYTES
    return True


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
