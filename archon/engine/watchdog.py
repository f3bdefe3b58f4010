"""Stall watchdog: write the stacks of every rank when a step takes too long on one rank."""

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

from archon.parallel.torch_private import run_store

POLL_S = 1.0
"""Seconds between checks for stalls reported by other ranks."""

logger = logging.getLogger(__name__)


class StallWatchdog:
    """Watchdog that writes the stacks of all ranks to rankN.txt when a block takes too long.

    faulthandler dumps the slow rank. It needs neither the GIL nor memory, so it also dumps a rank that hangs in a
    kernel or a collective; the run continues. The slow rank reports the stall in the run's store. A thread of every
    rank polls the store each `POLL_S` seconds and dumps its rank too. This thread needs the GIL: a rank that holds
    the GIL outside a block writes no stacks.

    Every rank must create its watchdogs in the same order. A nested block belongs to the outer one.

    Args:
        seconds: maximum duration of a block; None disables the watchdog.
    """

    _numbers = count()

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.folder = Path("stacks")
        self.rank = 0
        self._inside = False
        self._deadline = math.inf
        """The time.monotonic() at which this rank reports a stall."""
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
        """Watch the block; raise OSError if the folder is not writable."""
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
        """Stop the polling thread; exiting while it runs may crash the process."""
        self._ended.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout=2 * POLL_S)

    def _watch_reports(self) -> None:
        """Report this rank's stall and write its stacks at each report, until `end`."""
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
            return  # the store's process has ended, and so has the run

    def _write(self, reporter: int) -> None:
        """Append this rank's stacks to its file unless faulthandler already did."""
        with self._lock:
            written, self._deadline = time.monotonic() > self._deadline, math.inf
            if written:
                return
            faulthandler.cancel_dump_traceback_later()
            state = "is in a step" if self._inside else "is between steps"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(f"rank {reporter} takes longer than {self.seconds:g} s; rank {self.rank} {state}\n")
                    file.flush()
                    faulthandler.dump_traceback(file)
            except OSError as error:
                logger.warning("the stacks of rank %d could not be written: %s", self.rank, error)
