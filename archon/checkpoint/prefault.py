"""Page faults taken in one system call, for memory that is about to be filled."""

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
    """Make the kernel map the pages of newly allocated memory at once, which costs less than one fault per page.

    Huge pages are not requested: on a virtual machine the host must provide them, which takes 3 times as long.
    """
    madvise = _madvise()
    if madvise is None:
        return
    start = target.data_ptr() - target.data_ptr() % PAGE_BYTES
    size = -(-(target.data_ptr() + target.nbytes - start) // PAGE_BYTES) * PAGE_BYTES
    madvise(start, size, _MADV_POPULATE_WRITE)  # kernels before 5.14 return an error: the pages then fault one by one


@functools.cache
def _madvise() -> Callable[[int, int, int], Any] | None:
    """Returns the C library's madvise; None where there is none."""
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
