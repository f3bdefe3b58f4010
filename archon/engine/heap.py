"""Returns unused heap memory to the system, which grows when every batch has another shape.

glibc returns only free memory at its heap's end, and tensors of many sizes leave holes before it. And oneDNN, which
multiplies matrices on a CPU, caches up to a thousand primitives by shape, in bfloat16 about half a mebibyte each, and
PyTorch as many for each thread.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from pathlib import Path

# A process may hold GROWTH times what its steps need, plus EXTRA_BYTES, before its heap is trimmed. A check takes some
# microseconds, trimming tens of milliseconds, and faulting in the pages of a large step again hundreds.
GROWTH, EXTRA_BYTES = 1.25, 64 << 20

# The bytes that may be held now; and by kind of work, the bytes held before its last trim, until its next step.
_trim_threshold = 0.0
_bytes_before_trim: dict[str, int] = {}


def trim_heap_if_grown(work: str) -> bool:
    """Return the heap's free pages to the system if this process holds a quarter more than its steps need.

    Called after a step of `work`; no effect without glibc. A step needs what is held both after the step that trimmed
    the heap and after the next one of the same work. Returns whether the heap was trimmed.
    """
    global _trim_threshold
    trim = _malloc_trim()
    if trim is None:
        return False
    held = _resident_bytes()
    before = _bytes_before_trim.pop(work, None)
    if before is not None:
        _trim_threshold = max(_trim_threshold, _threshold_for(min(held, before)))
    if held <= _trim_threshold:
        return False
    trim(0)
    _trim_threshold, _bytes_before_trim[work] = _threshold_for(_resident_bytes()), held
    return True


def _threshold_for(held: int) -> float:
    return GROWTH * held + EXTRA_BYTES


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Returns glibc's function on Linux; None elsewhere."""
    try:
        _resident_bytes()
        function = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_size_t,)
    function.restype = ctypes.c_int
    return function
