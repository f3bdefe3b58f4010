"""Huge pages for memory that is filled for the first time, where they are the cheaper ones.

Filling fresh memory is mostly the kernel's work: a page fault for each 4 KiB or, where a process asks for huge pages
(`madvise`, Linux's usual setting), for each 2 MiB. Measured, in ns a byte with the copy: 0.45 against 0.15. But a
virtual machine that hands free memory back to its host hands back large blocks only, so that a huge page may have to be
fetched from the host again: 2.5. And once small blocks run out, small pages come from there as well: 3.1. Which it is
changes within a second, so it is measured piece by piece while the memory is filled.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HUGE_PAGE_BYTES = 2 * 2**20
_PAGE_BYTES = 4096
_MADV_HUGEPAGE = 14
# Pieces between two trials of the page size that seems to be the dearer one.
_FIRST_PAUSE, _LAST_PAUSE = 4, 128


class HugePageAdvisor:
    """Chooses the page size for one piece of fresh memory after another, by what the last of each size took.

    May be used by several threads: a lost update costs a measurement.
    """

    def __init__(self) -> None:
        self._cost: dict[bool, float] = {}
        self._pause = self._left = _FIRST_PAUSE

    @contextmanager
    def filling(self, address: int, size: int) -> Iterator[None]:
        """Around the code that fills `size` bytes at `address` for the first time, in the calling thread."""
        madvise = _madvise()
        if madvise is None or size < HUGE_PAGE_BYTES:
            yield
            return
        huge = self.choose()
        if huge:
            start = address - address % _PAGE_BYTES
            madvise(start, -(-(address + size - start) // _PAGE_BYTES) * _PAGE_BYTES, _MADV_HUGEPAGE)
        # The thread's own time: other processes do not blur it, while faults, the host's included, are part of it.
        begin = time.thread_time()
        yield
        self.observe(huge, (time.thread_time() - begin) / size)

    def choose(self) -> bool:
        """Whether the next piece shall have huge pages: the cheaper size, and now and then the other one."""
        if len(self._cost) < 2:
            return False in self._cost
        self._left -= 1
        return self._huge_is_cheaper() ^ (self._left <= 0)

    def observe(self, huge: bool, cost: float) -> None:
        """What a piece took, in any unit. After a trial that changes nothing, the pause before the next is longer."""
        before = self._huge_is_cheaper()
        self._cost[huge] = cost
        if self._huge_is_cheaper() != before:
            self._pause = self._left = _FIRST_PAUSE
        elif self._left <= 0:
            self._pause = self._left = min(2 * self._pause, _LAST_PAUSE)

    def _huge_is_cheaper(self) -> bool:
        return self._cost.get(True, 0.0) <= self._cost.get(False, 0.0)


@functools.cache
def _madvise() -> Callable[[int, int, int], Any] | None:
    """The C library's; None where there is none."""
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
