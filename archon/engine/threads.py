"""Limit CPU compute threads to the processors that other programs leave free.

OpenMP threads spin at a barrier after every matmul. If another program delays one thread, the other threads burn CPU
time. On two processors with two background CPU loops, fine-tuning a small model with two threads takes four times as
long as without the loops; with one thread it takes less than twice as long.
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
"""Minimum seconds between CPU load checks."""


class Load(NamedTuple):
    """CPU time of a process and of its processors since boot.

    Attributes:
        processors: number of processors in the process's affinity mask.
        busy: total busy seconds of these processors.
        process: CPU seconds of the process.
    """

    processors: int
    busy: float
    process: float


def adjust_threads() -> None:
    """Set the calling thread's torch thread count to the number of free processors.

    The count is between one and torch's count at the first call. Calls measure the load at most every 2 s and use the
    larger of the last two counts, since many programs are busy only while they start. There is no effect with
    `OMP_NUM_THREADS` in the environment, after `torch.set_num_threads` or `use_all_threads`, or outside Linux.
    """
    _PROCESS.adjust()


def use_all_threads() -> None:
    """Use all torch threads in this process from now on, regardless of the load."""
    _PROCESS.use_all()


class ThreadController:
    """Controller of a process's thread count.

    Args:
        measure_load: returns the current load; raises OSError, ValueError or AttributeError if it is unknown.
        clock: returns the time in seconds.
    """

    def __init__(self, measure_load: Callable[[], Load], clock: Callable[[], float] = time.monotonic) -> None:
        self._measure_load, self._clock = measure_load, clock
        self._lock = threading.Lock()
        self._set = threading.local()  # .count: the thread's count set by this class
        self._max_threads = self._count = self._free = 0  # 0: not initialized
        self._can_measure = True
        self._is_overridden = False  # by other code
        self._last, self._last_load = 0.0, Load(0, 0.0, 0.0)

    def adjust(self) -> None:
        """Set the calling thread's count; see `adjust_threads`."""
        with self._lock:
            if self._is_overridden:
                return
            threads = torch.get_num_threads()
            if not self._max_threads:
                self._initialize(threads)
            elif threads != getattr(self._set, "count", threads) or threads > self._max_threads:
                self._is_overridden = True
            elif self._can_measure and self._clock() - self._last >= SECONDS:
                self._update_load()
            if not self._is_overridden:
                self._set_threads(threads)

    def use_all(self) -> None:
        """Use all threads; see `use_all_threads`."""
        with self._lock:
            self._can_measure, self._count = False, self._max_threads
            if self._max_threads and not self._is_overridden:
                self._set_threads(torch.get_num_threads())

    def _set_threads(self, threads: int) -> None:
        if threads != self._count:
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
        last, last_load, last_free = self._last, self._last_load, self._free
        try:
            now, load = self._clock(), self._measure_load()
        except (OSError, ValueError):
            return
        background = max(0.0, (load.busy - last_load.busy) - (load.process - last_load.process)) / (now - last)
        self._last, self._last_load = now, load
        self._free = min(max(round(load.processors - background), 1), self._max_threads)
        count = max(last_free, self._free)
        if count != self._count:
            logger.info(
                "using %d threads instead of %d: other programs use %.1f processors", count, self._count, background
            )
            self._count = count


def process_load() -> Load:
    """Return the load of this process's processors.

    Niced programs yield to this process, so their time counts only if this process is niced too.

    Raises:
        OSError: /proc/stat cannot be read.
        ValueError: /proc/stat lacks a processor.
        AttributeError: the system is not Linux.
    """
    affinity = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    processors, niced, ticks = len(affinity), os.getpriority(os.PRIO_PROCESS, 0) > 0, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *columns = line.split()
        if name in affinity:
            affinity.remove(name)
            user, nice, system, _idle, _waiting, interrupts, soft, *_ = map(int, columns)
            ticks += user + system + interrupts + soft + niced * nice
    if affinity:
        raise ValueError(f"/proc/stat has no {' '.join(sorted(affinity))}")
    process = os.times()
    return Load(processors, ticks / os.sysconf("SC_CLK_TCK"), process.user + process.system)


_PROCESS = ThreadController(process_load)
