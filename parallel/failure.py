"""Stop all ranks within seconds when one fails, and say why in at most three lines.

A rank with its own error prints it. If a rank dies or is stopped, one of the others prints its name, the file with the
tracebacks of all ranks, and how to continue. Under `archon launch` the launcher prints these lines, because it knows
the signal. The ranks communicate through the store of torchrun, which outlives them.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from archon.parallel.rendezvous import open_store

GRACE_SECONDS = 3.0
"""Seconds that a rank has to exit by itself after another rank failed."""
POLL_SECONDS = 0.5
FAILURE_FILE = "failure.txt"
"""File of a run directory, or of a temporary folder, with the tracebacks and messages of all failed ranks."""
LAUNCHER = "ARCHON_LAUNCHER"
"""Environment variable of the ranks of `archon launch`: its process id, a space, and the folder of `RUN_FILE`,
`REPORT_FILE` and, without a run directory, `FAILURE_FILE`."""
RUN_FILE, REPORT_FILE = "run", "report.json"

_current: FailureMonitor | None = None
_run_dir: Path | None = None
_advice: Callable[[], str] | None = None
_stderr: int | None = None  # descriptor of stderr while `mute` is in effect
_muting = threading.Lock()


def describe_run(folder: Path | None, advice: Callable[[], str] | None = None) -> None:
    """Set the folder of `FAILURE_FILE` and a function that returns one line on how to continue after a failure."""
    global _run_dir, _advice
    _run_dir, _advice = None if folder is None else folder.absolute(), advice
    if (launch := launch_folder()) is not None and os.environ.get("LOCAL_RANK") == "0":
        with suppress(OSError):  # the folder was removed; the launcher then names its own
            (launch / RUN_FILE).write_text(str(_run_dir or ""), errors="surrogateescape")


def launch_folder() -> Path | None:
    """Return the folder of the `archon launch` that started this process; None if something else did."""
    process, _, folder = os.environ.get(LAUNCHER, "").partition(" ")
    return Path(folder) if process == str(os.getppid()) else None


def is_failing() -> bool:
    """Return whether a rank has failed, so that a SIGTERM is torchrun's and not the user's. Safe in signal handlers."""
    return _current is not None and _current.knows_failure()


class FailureMonitor:
    """Shares failures between the ranks of one start of a run.

    Args:
        rank: rank of this process.
        neighbors: ranks on this machine.
        store: a separate connection to the store of torchrun.
        size: number of ranks.
        limit_s: seconds after which a rank that does not run is lost.
    """

    def __init__(
        self, rank: int, neighbors: range, store: dist.Store, size: int = 1, limit_s: float = math.inf
    ) -> None:
        self.rank = rank
        self._neighbors = neighbors
        self._store = store
        self._size = size
        self._limit_s = limit_s
        self._beat, self._silent_s = b"", 0.0  # of the next rank
        self._polled = time.monotonic()
        self._processes: dict[int, int] = {}
        self._failing = threading.Event()
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def has_remote_ranks(self) -> bool:
        """Whether ranks run on other machines."""
        return self._size > len(self._neighbors)

    @classmethod
    def connect(cls, limit_s: float = math.inf) -> FailureMonitor | None:
        """Return the monitor that watches in this process, or a new one, through the environment of torchrun.

        None for a single process or a launcher without a store.
        """
        if _current is not None:
            return _current
        env, store = os.environ, open_store(timedelta(seconds=10))
        if store is None:
            return None
        rank = int(env["RANK"])
        first = rank - int(env["LOCAL_RANK"])
        neighbors = range(first, first + int(env["LOCAL_WORLD_SIZE"]))
        return cls(rank, neighbors, store, int(env["WORLD_SIZE"]), limit_s)

    def watch(self) -> None:
        """Start a thread that ends this process when another rank fails, dies, or does not run any more.

        torchrun sends SIGTERM to all ranks as soon as one dies. A rank then has `GRACE_SECONDS` to report the reason,
        also while its own error still runs cleanup code.
        """
        global _current
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit_after_grace)
        self._store.set(f"process/{self.rank}", f"{os.getpid()} {socket.gethostname()}")
        self._watcher = threading.Thread(target=self._watch, name="archon-failure", daemon=True)
        self._watcher.start()
        _current = self

    def mark_done(self) -> None:
        """Record that this rank has ended normally."""
        global _current
        self._ended.set()
        if self._watcher is not None:
            # At exit, Python stops daemon threads anywhere; inside a store call that would abort the process.
            self._watcher.join(GRACE_SECONDS)
        self._store.set(f"done/{self.rank}", "")
        _current = None

    def report_error(self, text: str) -> bool:
        """Print this rank's own error if it is the first failure, else wait for that; return whether it is."""
        return self._report(lambda: self._print(text, {"error": True}))

    def report_loss(self, reason: str, stopped: bool = False) -> None:
        """Print that another rank is lost, unless a failure was reported before: at most three lines.

        Args:
            reason: which rank is lost, and how.
            stopped: whether it still existed, so that the signal that ended it came from archon.
        """
        advice = "" if _advice is None else _advice()
        report = {"reason": reason, "stopped": stopped, "advice": advice}
        self._report(lambda: self._print(_loss_message(reason, advice), report))

    def _report(self, write: Callable[[], None]) -> bool:
        self._ended.set()
        self._failing.set()
        is_first = False
        try:
            is_first = self._store.compare_set("failed", "", str(self.rank)).decode() == str(self.rank)
            if is_first:
                write()
                self._store.set("reported", "")
            else:
                self._store.wait(["reported"], timedelta(seconds=GRACE_SECONDS))
        except RuntimeError:  # torchrun itself has exited, or the failed rank could not write
            pass
        return is_first

    def _print(self, text: str, report: dict[str, object]) -> None:
        """Write `text` to stderr; a loss under `archon launch` only to `REPORT_FILE`."""
        folder = launch_folder()
        if folder is not None:
            with suppress(OSError):  # the launcher was killed and its folder removed
                (folder / REPORT_FILE).write_text(json.dumps(report))
        if folder is None or "error" in report or _restarts_left():
            _write_to_stderr(text)

    def knows_failure(self) -> bool:
        """Return whether the watching thread has seen a failure, or a process of this machine's ranks has ended."""
        return self._failing.is_set() or not all(map(_is_running, list(self._processes.values())))

    def dead_ranks(self) -> list[str]:
        """Return the ranks of this machine that have exited without `mark_done`."""
        for rank in self._neighbors:
            if rank not in self._processes and self._store.check([f"process/{rank}"]):
                self._processes[rank] = int(self._store.get(f"process/{rank}").split()[0])
        return [
            self._name(rank)
            for rank, pid in list(self._processes.items())
            if not _is_running(pid) and not self._store.check([f"done/{rank}"])
        ]

    def stopped_ranks(self) -> list[str]:
        """Return the ranks of this machine that SIGSTOP has stopped."""
        return [self._name(rank) for rank, pid in list(self._processes.items()) if _state(pid) == "T"]

    def _name(self, rank: int) -> str:
        pid, _, host = self._store.get(f"process/{rank}").decode().partition(" ")
        return f"rank {rank} (process {pid} on {host})"

    def lost_ranks(self) -> tuple[str, bool] | None:
        """Return which ranks of this machine have died or are stopped, and whether they are stopped; None if none."""
        if dead := self.dead_ranks():
            return f"{' and '.join(dead)} died", False
        if stopped := self.stopped_ranks():
            return f"{' and '.join(stopped)} is stopped (SIGSTOP)", True
        return None

    def silent_rank(self) -> int | None:
        """Return the next rank if its watching thread has not run for `limit_s` seconds.

        Each rank watches only the next one, so that the number of requests to the store grows with the ranks and not
        with their square. Only time in which this process runs is counted: a suspended job continues.
        """
        peer, now = (self.rank + 1) % self._size, time.monotonic()
        elapsed, self._polled = min(now - self._polled, 2 * POLL_SECONDS), now
        if peer == self.rank or not self._store.check([f"alive/{peer}"]):
            return None
        beat = self._store.get(f"alive/{peer}")
        self._silent_s = self._silent_s + elapsed if beat == self._beat else 0.0
        self._beat = beat
        is_silent = self._silent_s > self._limit_s and not self._store.check([f"done/{peer}"])
        return peer if is_silent else None

    def _watch(self) -> None:
        beats, stopped, parent = 0, False, os.getppid()
        while not self._ended.wait(POLL_SECONDS):
            reason = None
            try:
                beats += 1
                self._store.set(f"alive/{self.rank}", str(beats))
                failed = self._store.check(["failed"])
                if not failed and (dead := self.dead_ranks()):
                    reason = f"{' and '.join(dead)} died"
                elif not failed and (silent := self.silent_rank()) is not None:
                    reason = f"{self._name(silent)} has not run for {self._limit_s:g} s: it is stopped, or hangs"
                    stopped = True
            except RuntimeError:
                if os.getppid() != parent:  # torchrun has exited, and ends its processes
                    return
                self._store = open_store(timedelta(seconds=10)) or self._store  # a rank without beats would be lost
                continue
            if not failed and reason is None:
                continue
            self._failing.set()
            mute()
            if not stopped and self._ended.wait(GRACE_SECONDS):
                return
            if reason is not None:
                write_failure(f"archon: rank {self.rank}: {reason}; the stacks of this rank:\n", stacks=True)
                self.report_loss(reason, stopped)
            self.end_stopped_ranks()
            _exit(1)

    def end_stopped_ranks(self) -> None:
        """Kill the stopped ranks of this machine, and the next rank if it is silent: they cannot react to SIGTERM.

        torchrun would wait 30 seconds for them. The ranks are found among the children of torchrun, because a rank
        that was stopped while it started has not joined the store.
        """
        end_stopped_children(os.getppid(), os.environ.get("TORCHELASTIC_RUN_ID", ""))
        if self._silent_s > self._limit_s:
            _kill(self._processes.get((self.rank + 1) % self._size))


def exit_rank(error: BaseException, message: str | None, failure: FailureMonitor) -> NoReturn:
    """Exit the process because of `error`: code 2 for a user error with a `message`, else code 1. Does not return.

    Exception handlers and `finally` blocks do not run: one could wait for other ranks.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun may already be ending the rest; print the reason first
    if message is not None:
        failure.report_error(f"archon: {message}\n")
    elif is_collective_error(error):
        mute()
        write_failure(f"archon: rank {failure.rank}: a collective failed:\n{_traceback(error)}")
        failure.report_loss(*_cause(error, failure))
    else:
        text = f"archon: rank {failure.rank} failed:\n{_traceback(error)}"
        if not failure.report_error(text):
            write_failure(text)
    sys.stdout.flush()
    failure.end_stopped_ranks()
    _exit(1 if message is None else 2)


def _cause(error: BaseException, failure: FailureMonitor) -> tuple[str, bool]:
    """Return why a collective failed, and whether a stopped rank is the reason."""
    with suppress(RuntimeError):  # torchrun has exited
        time.sleep(2 * POLL_SECONDS)  # torchrun takes a moment to reap a process that was killed
        if (lost := failure.lost_ranks()) is not None:
            return lost
        if failure.has_remote_ranks:
            time.sleep(4 * POLL_SECONDS)  # a rank on the machine of the lost one can name it
    text = " ".join(str(error).split())[:200]
    reason = "another rank ended, or came later than timeout_s allows"
    return f"rank {failure.rank}: a collective failed: {reason} ({text})", False


def write_failure(text: str, *, stacks: bool = False) -> None:
    """Append `text`, and with `stacks` the stacks of all threads, to `FAILURE_FILE`; to stderr if that fails."""
    try:
        with failure_file().open("a", errors="backslashreplace") as file:
            file.write(text)
            if stacks:
                file.flush()
                faulthandler.dump_traceback(file)
    except OSError:  # a full disk
        _write_to_stderr(text)


def failure_file() -> Path:
    """Return the path of `FAILURE_FILE`: in the run directory, in the folder of `archon launch`, or in torchrun's."""
    if _run_dir is not None and _run_dir.is_dir():
        return _run_dir / FAILURE_FILE
    if (folder := launch_folder()) is not None:
        return folder / FAILURE_FILE
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return Path(error_file).parents[1] / FAILURE_FILE
    return Path(_temporary_folder()) / FAILURE_FILE


@functools.cache
def _temporary_folder() -> str:
    return tempfile.mkdtemp(prefix="archon-")


def mute() -> None:
    """Send all further output on stderr to `FAILURE_FILE`: gloo and NCCL describe a lost connection at length."""
    global _stderr
    with suppress(OSError), _muting:
        if _stderr is None:
            file = os.open(failure_file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            sys.stderr.flush()
            _stderr = os.dup(2)
            os.dup2(file, 2)


def _exit(code: int) -> NoReturn:
    """End this process at once; without a `FAILURE_FILE` to which nothing was written."""
    if _stderr is not None:
        with suppress(OSError):
            if failure_file().stat().st_size == 0:
                failure_file().unlink()
    os._exit(code)


def _write_to_stderr(text: str) -> None:
    if _stderr is None:
        sys.stderr.write(text)
        sys.stderr.flush()
    else:
        os.write(_stderr, text.encode(errors="backslashreplace"))


def _loss_message(reason: str, advice: str) -> str:
    lines = [f"{reason}; all ranks stop", f"full output: {failure_file()}"]
    if _restarts_left():
        lines = [f"{reason}; torchrun starts all ranks again (full output: {failure_file()})"]
    elif advice:
        lines.append(advice)
    return "".join(f"archon: {line}\n" for line in lines)


def _restarts_left() -> bool:
    env = os.environ
    return int(env.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(env.get("TORCHELASTIC_MAX_RESTARTS", 0))


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
    return _state(pid) not in ("", "Z", "X")


def _state(pid: int) -> str:
    """Return the state letter of a process, or "" if there is none."""
    return _status(pid)[0]


def _status(pid: int) -> tuple[str, int]:
    """Return the state letter and the parent of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def end_stopped_children(parent: int, run: str | None = None) -> list[str]:
    """Kill the stopped ranks among the children of a torchrun process, and return their names.

    Args:
        parent: id of the process.
        run: TORCHELASTIC_RUN_ID of the ranks, if the process may have other children.
    """
    names = []
    for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
        if _status(pid) != ("T", parent):
            continue
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            environment = dict(line.partition("=")[::2] for line in lines)
            if "RANK" in environment and run in (None, environment.get("TORCHELASTIC_RUN_ID")):
                _kill(pid)
                names.append(f"rank {environment['RANK']} (process {pid} on {socket.gethostname()})")
    return names


def _kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
