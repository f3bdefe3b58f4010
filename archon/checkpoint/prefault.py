"""Memory that is about to be filled."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import Any

from torch import Tensor

PAGE_BYTES = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23


def prefault(target: Tensor) -> None:
    """Have the kernel provide the pages of fresh memory at once: one call costs less than a fault for each of them.

    Huge pages would be fewer, but on a virtual machine they are fetched from the host, and cost 3 times the time.
    """
    madvise = _madvise()
    if madvise is None:
        return
    start = target.data_ptr() - target.data_ptr() % PAGE_BYTES
    size = -(-(target.data_ptr() + target.nbytes - start) // PAGE_BYTES) * PAGE_BYTES
    madvise(start, size, _MADV_POPULATE_WRITE)  # refused by kernels before 5.14, which do without


@functools.cache
def _madvise() -> Callable[[int, int, int], Any] | None:
    """The C library's; None where there is none."""
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
