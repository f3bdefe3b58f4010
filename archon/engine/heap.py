"""Memory that grows without being used, where every batch has another shape.

glibc returns only what is free at its heap's end, and so many tensors of so many sizes leave holes before it. And
oneDNN, which multiplies matrices on a CPU, keeps what it made ready for each shape that it met, a thousand of them, in
bfloat16 some half a mebibyte each, and PyTorch as many again for each thread.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from pathlib import Path

# A process may hold so much more than its steps need, before its heap is trimmed. Looking takes some microseconds,
# trimming some tens of milliseconds, and some hundreds until the pages of a large step have been provided anew.
GROWTH, LEAST_BYTES = 1.25, 64 << 20

# What may be held now; by work, what was held when its step had the heap trimmed, until its next step.
_allowed = 0.0
_held_before: dict[str, int] = {}


def trim_if_grown(work: str) -> bool:
    """Return the heap's free pages to the system, if this process holds a quarter more than its steps need.

    Called after a step of `work`; does nothing where the C library cannot. What is held after the step that had the
    heap trimmed, and again after the next of the same work, is what a step needs. Returns whether it was trimmed.
    """
    global _allowed
    trim = _malloc_trim()
    if trim is None:
        return False
    held = _resident_bytes()
    before = _held_before.pop(work, None)
    if before is not None:
        _allowed = max(_allowed, _with_growth(min(held, before)))
    if held <= _allowed:
        return False
    trim(0)
    _allowed, _held_before[work] = _with_growth(_resident_bytes()), held
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
