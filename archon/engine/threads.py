"""Computes on a CPU with as many threads as other programs leave processors for.

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
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""At least, from one look at what else runs to the next."""


class Load(NamedTuple):
    """What a process's processors have done since the machine began.

    Attributes:
        processors: on how many it may run.
        busy: seconds in which they were, in total.
        own: seconds of the process.
    """

    processors: int
    busy: float
    own: float


def fit_threads() -> None:
    """Lets the calling thread compute with as many of torch's threads as there are processors free for them.

    At least one, and at most as many as torch had at the first call. What else runs is looked up at a call, every 2 s
    at most, and the larger number of two looks holds: many programs only start. No effect where the environment has
    `OMP_NUM_THREADS`, after `torch.set_num_threads` or `keep_threads`, nor elsewhere than on Linux.
    """
    _PROCESS.fit()


def keep_threads() -> None:
    """Lets this process compute with all of torch's threads from now on, whatever else runs."""
    _PROCESS.keep()


class FittingThreads:
    """The number of threads of a process.

    Args:
        look: returns the load now. Raises OSError, ValueError or AttributeError where nothing tells it.
        clock: returns the time in seconds.
    """

    def __init__(self, look: Callable[[], Load], clock: Callable[[], float] = time.monotonic) -> None:
        self._look_up, self._clock = look, clock
        self._lock = threading.Lock()
        self._set = threading.local()  # .count: the number that this class has given the thread
        self._most = self._count = self._free = 0  # 0: not asked yet
        self._looks = True
        self._chosen = False  # by somebody else
        self._last, self._last_load = 0.0, Load(0, 0.0, 0.0)

    def fit(self) -> None:
        """Same as `fit_threads`."""
        with self._lock:
            if self._chosen:
                return
            found = torch.get_num_threads()
            if not self._most:
                self._begin(found)
            elif found != getattr(self._set, "count", found) or found > self._most:
                self._chosen = True
            elif self._looks and self._clock() - self._last >= SECONDS:
                self._look()
            if not self._chosen:
                self._give(found)

    def keep(self) -> None:
        """Same as `keep_threads`."""
        with self._lock:
            self._looks, self._count = False, self._most
            if self._most and not self._chosen:
                self._give(torch.get_num_threads())

    def _give(self, found: int) -> None:
        if found != self._count:
            torch.set_num_threads(self._count)
        self._set.count = self._count

    def _begin(self, threads: int) -> None:
        self._most = self._count = self._free = threads
        self._chosen = "OMP_NUM_THREADS" in os.environ
        try:
            self._last, self._last_load = self._clock(), self._look_up()
        except (OSError, ValueError, AttributeError):  # not Linux, or /proc is hidden
            self._looks = False

    def _look(self) -> None:
        then, before, free_before = self._last, self._last_load, self._free
        try:
            now, load = self._clock(), self._look_up()
        except (OSError, ValueError):
            return
        others = max(0.0, (load.busy - before.busy) - (load.own - before.own)) / (now - then)
        self._last, self._last_load = now, load
        self._free = min(max(round(load.processors - others), 1), self._most)
        count = max(free_before, self._free)
        if count != self._count:
            logger.info("%d threads instead of %d: others use %.1f processors", count, self._count, others)
            self._count = count


def load_of_process() -> Load:
    """Returns the load of this process's processors, without what runs niced unless it is so itself: that gives way.

    Raises OSError or ValueError where /proc/stat does not tell, AttributeError elsewhere than on Linux.
    """
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    processors, niced, ticks = len(mine), os.getpriority(os.PRIO_PROCESS, 0) > 0, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *columns = line.split()
        if name in mine:
            mine.remove(name)
            user, nice, system, _idle, _waiting, interrupts, soft, *_ = map(int, columns)
            ticks += user + system + interrupts + soft + niced * nice
    if mine:
        raise ValueError(f"/proc/stat has no {' '.join(sorted(mine))}")
    own = os.times()
    return Load(processors, ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system)


_PROCESS = FittingThreads(load_of_process)
