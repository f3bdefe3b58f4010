"""Computes with as many threads as other programs leave processors for.

OpenMP's threads wait for each other after every product, and spin while they wait: where other programs keep one of
them off its processor, the rest burn theirs. On two processors next to two busy programs, fine-tuning a small model
takes four times as long as alone with two threads, and less than twice as long with one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""From one look at what else runs to the next."""


def fit_threads() -> None:
    """Lets the calling thread compute with as many of torch's threads as there are processors free for them.

    Looked up every 2 s, and the larger number of two looks: many programs only start. At least one, and at most as many
    as torch takes by itself. No effect where the environment has `OMP_NUM_THREADS`, after `torch.set_num_threads` or
    `keep_threads`, nor elsewhere than on Linux.
    """
    _PROCESS.fit()


def keep_threads() -> None:
    """Lets this process compute with one number of threads from now on, which is torch's own."""
    _PROCESS.keep()


class FittingThreads:
    """The number of threads of a process.

    Args:
        busy: returns for how many seconds this process's processors have been busy, and this process itself.
        clock: returns the time in seconds.
        processors: how many it may run on.
    """

    def __init__(
        self,
        busy: Callable[[], tuple[float, float]],
        clock: Callable[[], float] = time.monotonic,
        processors: int | None = None,
    ) -> None:
        self._busy, self._clock, self._processors = busy, clock, processors
        self._set = threading.local()  # .count: the number that this class has given the thread
        self._most = self._count = self._free = 0  # 0: not asked yet
        self._kept = False
        self._last = (0.0, 0.0, 0.0)  # time and totals of the last look

    def fit(self) -> None:
        """Same as `fit_threads`."""
        if self._kept:
            return
        found = torch.get_num_threads()
        if not self._most:
            self._begin(found)
        elif found != getattr(self._set, "count", found) or found > self._most:
            self._kept = True  # somebody has called torch.set_num_threads
        elif self._clock() - self._last[0] >= SECONDS:
            self._look()
        if self._kept:
            return
        if found != self._count:
            torch.set_num_threads(self._count)
        self._set.count = self._count

    def keep(self) -> None:
        """Same as `keep_threads`."""
        self._kept = True
        if hasattr(self._set, "count"):
            torch.set_num_threads(self._most)

    def _begin(self, threads: int) -> None:
        self._most = self._count = self._free = threads
        chosen = "OMP_NUM_THREADS" in os.environ
        try:
            self._last = (self._clock(), *self._busy())
            self._processors = self._processors or len(os.sched_getaffinity(0))
        except (OSError, ValueError, AttributeError):  # not Linux, or /proc is hidden
            chosen = True
        self._kept = chosen or threads == 1

    def _look(self) -> None:
        then, busy_then, own_then = self._last
        now, busy, own = self._last = (self._clock(), *self._busy())
        others = max(0.0, (busy - busy_then) - (own - own_then)) / (now - then)
        assert self._processors is not None
        before, self._free = self._free, min(max(round(self._processors - others), 1), self._most)
        count = max(before, self._free)
        if count != self._count:
            logger.info("%d threads instead of %d: others use %.1f processors", count, self._count, others)
            self._count = count


def busy_seconds() -> tuple[float, float]:
    """Returns how long this process's processors have been busy since the machine began, and how long this process.

    Without what runs niced, as that gives way. Raises OSError or ValueError where /proc/stat does not tell.
    """
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *columns = line.split()
        if name in mine:
            mine.remove(name)
            user, _nice, system, _idle, _waiting, interrupts, soft, *_ = map(int, columns)
            ticks += user + system + interrupts + soft
    if mine:
        raise ValueError(f"/proc/stat has no {' '.join(sorted(mine))}")
    own = os.times()
    return ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system


_PROCESS = FittingThreads(busy_seconds)
