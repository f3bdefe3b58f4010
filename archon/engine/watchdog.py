"""Writes the stacks of every rank when a step takes too long on one of them."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch.distributed as dist

from archon.parallel.torch_groups import run_store

POLL_S = 1.0
"""Seconds between a rank's looks at whether another has reported a stall."""

logger = logging.getLogger(__name__)


class StallWatchdog:
    """Writes stacks to rankN.txt in a folder: this rank's when its own block takes longer than `seconds`, and those of
    all ranks then, the one that is busy or asleep elsewhere included.

    A block that takes too long is dumped by faulthandler, which needs neither the GIL nor memory, so that a rank that
    hangs in a kernel or a collective is dumped too; the run continues. The rank also reports the stall in the store of
    the run, where a thread of each rank looks every `POLL_S` seconds. That thread needs the GIL: a rank that holds it
    outside of a block is the only one that leaves no stacks.

    Ranks make their watches in the same order. `seconds` None watches nothing. A process has one block at a time; one
    inside another is part of it.
    """

    _numbers = count()

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.folder = Path("stacks")
        self.rank = 0
        self._inside = False
        self._deadline = math.inf
        """When this rank reports a stall, by time.monotonic()."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if seconds is not None and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self._reports = dist.PrefixStore(f"archon stalls {next(self._numbers)}", run_store())
            self._thread = threading.Thread(target=self._watch_reports, name="archon stall watch", daemon=True)
            self._thread.start()

    @property
    def path(self) -> Path:
        """The file of this rank's stacks."""
        return self.folder / f"rank{self.rank}.txt"

    @contextmanager
    def block(self) -> Iterator[None]:
        """Watch the block. Raises OSError where the folder cannot be written."""
        if self.seconds is None or self._inside:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            self._inside, self._deadline = True, time.monotonic() + self.seconds
            faulthandler.dump_traceback_later(self.seconds, file=file)
            try:
                yield
            finally:
                with self._lock:
                    faulthandler.cancel_dump_traceback_later()
                    self._inside, self._deadline = False, math.inf
                if not os.fstat(file.fileno()).st_size:
                    self.path.unlink(missing_ok=True)

    def end(self) -> None:
        """Stop the thread that looks for reports; a process that exits while it runs may crash."""
        self._ended.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout=2 * POLL_S)

    def _watch_reports(self) -> None:
        """Report this rank's stall and write its stacks at each report, until `end` or the run's store is gone."""
        stalls = 0
        try:
            while not self._ended.wait(POLL_S):
                key = str(stalls)
                if time.monotonic() > self._deadline:
                    self._reports.set(key, str(self.rank))
                if self._reports.check([key]):
                    self._write(int(self._reports.get(key)))
                    stalls += 1
        except (dist.DistError, RuntimeError):
            return  # the process of the store has ended, and the run with it

    def _write(self, reporter: int) -> None:
        """Append this rank's stacks to its file, unless its own block did so."""
        with self._lock:
            written, self._deadline = time.monotonic() > self._deadline, math.inf
            if written:
                return
            faulthandler.cancel_dump_traceback_later()
            where = "is in a step of its own" if self._inside else "is between steps"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(f"rank {reporter} takes longer than {self.seconds:g} s; rank {self.rank} {where}\n")
                    file.flush()
                    faulthandler.dump_traceback(file)
            except OSError as error:
                logger.warning("the stacks of rank %d could not be written: %s", self.rank, error)
