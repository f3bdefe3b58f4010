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
        process: seconds of the process.
    """

    processors: int
    busy: float
    process: float


def adjust_threads() -> None:
    """Lets the calling thread compute with as many of torch's threads as there are processors free for them.

    At least one, and at most as many as torch had at the first call. What else runs is looked up at a call, every 2 s
    at most, and the larger number of two looks holds: many programs only start. No effect where the environment has
    `OMP_NUM_THREADS`, after `torch.set_num_threads` or `use_all_threads`, nor elsewhere than on Linux.
    """
    _PROCESS.adjust()


def use_all_threads() -> None:
    """Lets this process compute with all of torch's threads from now on, whatever else runs."""
    _PROCESS.use_all()


class ThreadController:
    """The number of threads of a process.

    Args:
        measure_load: returns the load now. Raises OSError, ValueError or AttributeError where nothing tells it.
        clock: returns the time in seconds.
    """

    def __init__(self, measure_load: Callable[[], Load], clock: Callable[[], float] = time.monotonic) -> None:
        self._measure_load, self._clock = measure_load, clock
        self._lock = threading.Lock()
        self._set = threading.local()  # .count: the number that this class has given the thread
        self._max_threads = self._count = self._free = 0  # 0: not asked yet
        self._can_measure = True
        self._is_overridden = False  # by somebody else
        self._last, self._last_load = 0.0, Load(0, 0.0, 0.0)

    def adjust(self) -> None:
        """Same as `adjust_threads`."""
        with self._lock:
            if self._is_overridden:
                return
            found = torch.get_num_threads()
            if not self._max_threads:
                self._initialize(found)
            elif found != getattr(self._set, "count", found) or found > self._max_threads:
                self._is_overridden = True
            elif self._can_measure and self._clock() - self._last >= SECONDS:
                self._update_load()
            if not self._is_overridden:
                self._set_threads(found)

    def use_all(self) -> None:
        """Same as `use_all_threads`."""
        with self._lock:
            self._can_measure, self._count = False, self._max_threads
            if self._max_threads and not self._is_overridden:
                self._set_threads(torch.get_num_threads())

    def _set_threads(self, found: int) -> None:
        if found != self._count:
            torch.set_num_threads(self._count)
        self._set.count = self._count

    def _initialize(self, threads: int) -> None:
        self._max_threads = self._count = self._free = threads
        self._is_overridden = "OMP_NUM_THREADS" in os.environ
        try:
            self._last, self._last_load = self._clock(), self._measure_load()
        except (OSError, ValueError, AttributeError):  # not Linux, or /proc is hidden
            self._can_measure = False

    def _update_load(self) -> None:
        then, before, free_before = self._last, self._last_load, self._free
        try:
            now, load = self._clock(), self._measure_load()
        except (OSError, ValueError):
            return
        others = max(0.0, (load.busy - before.busy) - (load.process - before.process)) / (now - then)
        self._last, self._last_load = now, load
        self._free = min(max(round(load.processors - others), 1), self._max_threads)
        count = max(free_before, self._free)
        if count != self._count:
            logger.info("%d threads instead of %d: others use %.1f processors", count, self._count, others)
            self._count = count


def process_load() -> Load:
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
    process = os.times()
    return Load(processors, ticks / os.sysconf("SC_CLK_TCK"), process.user + process.system)


_PROCESS = ThreadController(process_load)
