"""Stop all ranks within seconds when one fails: the first failing rank prints the reason, the others exit silently.

The ranks communicate through the store of torchrun, which outlives them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from archon.parallel.rendezvous import open_store

GRACE_SECONDS = 3.0
"""Seconds that a rank has to exit by itself after another rank failed."""
POLL_SECONDS = 0.5


class FailureMonitor:
    """Shares failures between the ranks of one start of a run.

    Args:
        rank: rank of this process.
        neighbors: ranks on this machine.
        store: a separate connection to the store of torchrun.
    """

    def __init__(self, rank: int, neighbors: range, store: dist.Store) -> None:
        self.rank = rank
        self._neighbors = neighbors
        self._store = store
        self._processes: dict[int, int] = {}
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    @classmethod
    def connect(cls) -> FailureMonitor | None:
        """Connect through the environment of torchrun; None for a single process or a launcher without a store."""
        env, store = os.environ, open_store(timedelta(seconds=10))
        if store is None:
            return None
        rank = int(env["RANK"])
        first = rank - int(env["LOCAL_RANK"])
        neighbors = range(first, first + int(env["LOCAL_WORLD_SIZE"]))
        return cls(rank, neighbors, store)

    def watch(self) -> None:
        """Start a thread that ends this process when another rank fails or dies.

        torchrun sends SIGTERM to all ranks as soon as one dies. A rank then has `GRACE_SECONDS` to report the reason,
        also while its own error still runs cleanup code.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit_after_grace)
        self._store.set(f"process/{self.rank}", str(os.getpid()))
        self._watcher = threading.Thread(target=self._watch, name="archon-failure", daemon=True)
        self._watcher.start()

    def mark_done(self) -> None:
        """Record that this rank has ended normally."""
        self._ended.set()
        if self._watcher is not None:
            # At exit, Python stops daemon threads anywhere; inside a store call that would abort the process.
            self._watcher.join(GRACE_SECONDS)
        self._store.set(f"done/{self.rank}", "")

    def report(self, text: str) -> None:
        """Write `text` to stderr if this is the first failure; else wait until the first failed rank has written."""
        self._ended.set()
        try:
            first = self._store.compare_set("failed", "", str(self.rank)).decode()
            if first == str(self.rank):
                sys.stderr.write(text)
                sys.stderr.flush()
                self._store.set("reported", "")
            else:
                self._store.wait(["reported"], timedelta(seconds=GRACE_SECONDS))
        except RuntimeError:  # torchrun itself has exited, or the failed rank could not write
            pass

    def dead_ranks(self) -> list[str]:
        """Return the ranks of this machine that have exited without `mark_done`."""
        dead_ranks = []
        for rank in self._neighbors:
            if rank not in self._processes and self._store.check([f"process/{rank}"]):
                self._processes[rank] = int(self._store.get(f"process/{rank}"))
            pid = self._processes.get(rank)
            if pid is not None and not _is_running(pid) and not self._store.check([f"done/{rank}"]):
                dead_ranks.append(f"rank {rank} (process {pid})")
        return dead_ranks

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                failed = self._store.check(["failed"])
                dead_ranks = [] if failed else self.dead_ranks()
            except RuntimeError:  # torchrun has exited, and ends its processes
                return
            if not failed and not dead_ranks:
                continue
            if self._ended.wait(GRACE_SECONDS):
                return
            if dead_ranks:
                self.report(f"archon: rank {self.rank}: stopping because {' and '.join(dead_ranks)} died\n")
            os._exit(1)


def exit_rank(error: BaseException, message: str | None, failure: FailureMonitor) -> None:
    """Exit the process because of `error`: code 2 for a user error with a `message`, else code 1. Does not return.

    Exception handlers and `finally` blocks do not run: one could wait for other ranks.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun may already be ending the rest; print the reason first
    if message is not None:
        text = f"archon: {message}\n"
    elif is_collective_error(error):
        time.sleep(2 * POLL_SECONDS)  # torchrun takes a moment to reap a process that was killed
        dead_ranks = failure.dead_ranks()
        why = (
            f"{' and '.join(dead_ranks)} died"
            if dead_ranks
            else "another rank ended, or came later than timeout_s allows"
        )
        text = f"{_traceback(error)}archon: rank {failure.rank}: a collective failed: {why}\n"
    else:
        text = f"archon: rank {failure.rank} failed:\n{_traceback(error)}"
    failure.report(text)
    sys.stdout.flush()
    os._exit(1 if message is None else 2)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def is_collective_error(error: BaseException) -> bool:
    """Return whether gloo or NCCL raised the error: by class, or by the text of a RuntimeError."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "connection closed by peer", "nccl")
    )


def _exit_after_grace(number: int, frame: FrameType | None) -> None:
    timer = threading.Timer(GRACE_SECONDS, os._exit, (128 + number,))
    timer.daemon = True  # a process that ends earlier need not wait
    timer.start()


def _is_running(pid: int) -> bool:
    """Return whether a process is running; zombies are not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
