"""Return unused heap memory to the system; the heap grows if every batch has another shape.

glibc returns only free memory at the end of its heap, and tensors of many sizes leave holes before it. In addition,
oneDNN's CPU matmuls cache up to a thousand primitives by shape (about 0.5 MiB each in bfloat16), and PyTorch as many
for each thread.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from pathlib import Path

# The heap is trimmed above GROWTH times the bytes that steps need, plus EXTRA_BYTES. A check takes microseconds,
# trimming takes tens of milliseconds, and page faults of the next large step take hundreds of milliseconds.
GROWTH, EXTRA_BYTES = 1.25, 64 << 20

# The current limit in bytes, and by kind of work the bytes before its last trim, until its next step.
_trim_threshold = 0.0
_bytes_before_trim: dict[str, int] = {}


def trim_heap_if_grown(work: str) -> bool:
    """Trim the heap if this process holds a quarter more memory than its steps need.

    Call it after each step of a kind of `work`. A step needs the smaller of two sizes: before the last trim and after
    the next step of the same work. There is no effect without glibc.

    Returns:
        Whether the heap was trimmed.
    """
    global _trim_threshold
    trim = _malloc_trim()
    if trim is None:
        return False
    resident = _resident_bytes()
    before = _bytes_before_trim.pop(work, None)
    if before is not None:
        _trim_threshold = max(_trim_threshold, _threshold_for(min(resident, before)))
    if resident <= _trim_threshold:
        return False
    trim(0)
    _trim_threshold, _bytes_before_trim[work] = _threshold_for(_resident_bytes()), resident
    return True


def _threshold_for(resident: int) -> float:
    return GROWTH * resident + EXTRA_BYTES


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim, or None if it is not available."""
    try:
        _resident_bytes()
        function = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_size_t,)
    function.restype = ctypes.c_int
    return function
