"""How all ranks end within seconds when one fails: the first to fail tells why, the others leave without a word.

The ranks of a torchrun know one another through the store that torchrun itself holds, which outlives them.
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

import torch.distributed as dist

GRACE_SECONDS = 3.0
"""What a rank has to end by itself after another has failed."""
POLL_SECONDS = 0.5


class Failure:
    """What the ranks of one start of a run know of each other's end.

    Args:
        rank: of this process.
        neighbors: the ranks of this machine.
        store: torchrun's, with a connection of its own.
    """

    def __init__(self, rank: int, neighbors: range, store: dist.Store) -> None:
        self.rank = rank
        self._neighbors = neighbors
        self._store = store
        self._processes: dict[int, int] = {}
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    @classmethod
    def connect(cls) -> Failure | None:
        """From torchrun's environment; None for a process alone, or one whose starter keeps no store."""
        env = os.environ
        if env.get("WORLD_SIZE", "1") == "1" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        try:
            store = dist.TCPStore(
                env["MASTER_ADDR"],
                int(env["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=10),
            )
        except (KeyError, ValueError, RuntimeError):
            return None
        prefix = f"archon/{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        rank = int(env["RANK"])
        first = rank - int(env["LOCAL_RANK"])
        neighbors = range(first, first + int(env["LOCAL_WORLD_SIZE"]))
        return cls(rank, neighbors, dist.PrefixStore(prefix, store))

    def watch(self) -> None:
        """From now on end this process when another rank fails or dies."""
        self._store.set(f"process/{self.rank}", str(os.getpid()))
        self._watcher = threading.Thread(target=self._watch, name="archon-failure", daemon=True)
        self._watcher.start()

    def done(self) -> None:
        """This rank has ended as it should."""
        self._ended.set()
        if self._watcher is not None:
            # Python ends a daemon thread at its next step; within a call of the store that would abort the process.
            self._watcher.join(GRACE_SECONDS)
        self._store.set(f"done/{self.rank}", "")

    def report(self, text: str) -> None:
        """Write `text` to stderr if no rank has failed before; else wait until the one that has has written its own."""
        self._ended.set()
        try:
            first = self._store.compare_set("failed", "", str(self.rank)).decode()
            if first == str(self.rank):
                _write(text)
                self._store.set("reported", "")
            else:
                self._store.wait(["reported"], timedelta(seconds=GRACE_SECONDS))
        except RuntimeError:  # torchrun itself has gone, or whoever failed could not write
            pass

    def dead(self) -> list[str]:
        """Ranks on this machine whose process has gone without an end."""
        found = []
        for rank in self._neighbors:
            if rank not in self._processes and self._store.check([f"process/{rank}"]):
                self._processes[rank] = int(self._store.get(f"process/{rank}"))
            pid = self._processes.get(rank)
            if pid is not None and not _runs(pid) and not self._store.check([f"done/{rank}"]):
                found.append(f"rank {rank} (process {pid})")
        return found

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                failed = self._store.check(["failed"])
                dead = [] if failed else self.dead()
            except RuntimeError:  # torchrun has gone; it takes its processes with it
                return
            if not failed and not dead:
                continue
            if self._ended.wait(GRACE_SECONDS):
                return
            if dead:
                self.report(f"archon: rank {self.rank}: ending, for {' and '.join(dead)} died\n")
            os._exit(1)


def end_rank(error: BaseException, message: str | None, failure: Failure) -> None:
    """Leave the process because of `error`: code 2 after a user's mistake (`message`), else 1; does not return.

    Nothing is unwound: what would wait for other ranks must not.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun may already be ending the rest; the reason comes first
    code = 2 if message is not None else 1
    if message is not None:
        text = f"archon: {message}\n"
    else:
        text = "".join(traceback.format_exception(error))
        if _of_a_collective(error):
            # torchrun takes a moment to bury a process that was killed.
            time.sleep(2 * POLL_SECONDS)
            dead = failure.dead()
            why = f"{' and '.join(dead)} died" if dead else "another rank ended, or came later than timeout_s allows"
            text += f"archon: rank {failure.rank}: a collective failed: {why}\n"
        else:
            text = f"archon: rank {failure.rank} failed:\n{text}"
    failure.report(text)
    sys.stdout.flush()
    os._exit(code)


def _of_a_collective(error: BaseException) -> bool:
    """gloo and NCCL raise these two, and plain RuntimeErrors that name their source."""
    kinds = (dist.DistBackendError, dist.DistNetworkError)
    text = str(error).lower()
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "connection closed by peer", "nccl"))
    )


def _runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
