"""The keeper of a process, its owner: at the owner's end it ends the owner's children and removes its folders.

`archon.schema.children` runs this file by its path, so it needs only Python. The keeper is no child of its owner and in
no process group of it, so it survives what ends the owner. The owner sends records through a pipe, each of them a
letter, a value and a NUL:

| letter | value | meaning |
|---|---|---|
| `+`, `-` | path | remove the folder after the owner's end; do not remove it |
| `g` | process id, group | kill all processes of the group when the process ends |
| `f` | process id | end the process with the owner: a fork of it, which has no mark |
| `p` | process id | kill the owner when the process ends |
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

MARK = "ARCHON_PARENT"
"""Environment variable of marked processes: tokens of ancestors and names of groups, separated by slashes."""
GRACE_SECONDS = 3.0
"""Seconds between SIGTERM and SIGKILL, so that a server or a launcher can end its own children."""
POLL_SECONDS = 0.2  # to notice an end without pidfd: other systems, and Linux before 5.3
_SCAN_SECONDS = 0.05
_SETTLE_SECONDS = 0.5  # a child of the owner, which has no mark itself, shows its mark only after exec
_GROUP_SETTLE_SECONDS = 0.1
_KERNEL_SECONDS = 30.0  # a process that is still there is stuck in the kernel


class Keeper:
    """Keeper of the process `owner`. Its children have `token` in their mark; the keeper reads from `pipe`."""

    def __init__(self, pipe: int, owner: int, token: str) -> None:
        self._pipe, self._token = pipe, token
        self._owner = _Process(owner)
        self._launcher: _Process | None = None
        self._awaited = [self._owner]
        self._forks: list[_Process] = []
        self._sweeps: list[_Sweep] = []
        self._folders: dict[bytes, None] = {}
        self._received, self._connected = b"", True

    def run(self) -> None:
        """Wait for the end of the owner, end the processes with its token, remove the folders."""
        os.set_blocking(self._pipe, False)
        while self._owner in self._awaited or self._sweeps:
            ready = self._wait()
            self._receive()  # everything that the owner sent, even if it has already ended
            for process in [*self._awaited, *self._forks]:
                if self._has_ended(process, ready):
                    self._handle_end(process)
            forks = [] if self._owner in self._awaited else [fork.pid for fork in self._forks]
            self._sweeps = [sweep for sweep in self._sweeps if not sweep.is_over(forks)]
        if self._folders:
            import shutil

            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _wait(self) -> set[int]:
        """Wait for a record, the end of a process, or the time of the next look; return the readable files."""
        files = [process.file for process in (*self._awaited, *self._forks)]
        seconds = _SCAN_SECONDS if self._sweeps else POLL_SECONDS if None in files else None
        poll = select.poll()
        for file in [*files, *[self._pipe] * self._connected]:
            if file is not None:
                poll.register(file, select.POLLIN)
        return {file for file, _ in poll.poll(None if seconds is None else seconds * 1000)}

    def _receive(self) -> None:
        while self._connected:
            try:
                data = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return
            self._connected = bool(data)
            *records, self._received = (self._received + data).split(b"\0")
            for record in records:
                self._take(record[:1], record[1:])

    def _take(self, letter: bytes, value: bytes) -> None:
        if letter == b"+":
            self._folders[value] = None
        elif letter == b"-":
            self._folders.pop(value, None)
        elif letter == b"g":
            pid, _, group = value.partition(b" ")
            self._awaited.append(_Process(int(pid), group.decode()))
        elif letter == b"f":
            self._forks.append(_Process(int(value)))
        elif letter == b"p":
            self._launcher = _Process(int(value))
            self._awaited.append(self._launcher)

    def _has_ended(self, process: _Process, ready: set[int]) -> bool:
        if process.file is not None:
            return process.file in ready
        return process.is_gone() or (process is self._owner and not self._connected)

    def _handle_end(self, process: _Process) -> None:
        if process.file is not None:
            os.close(process.file)
        if process in self._forks:
            self._forks.remove(process)
            return
        self._awaited.remove(process)
        if process is self._owner:
            self._sweeps.append(_Sweep(self._token, GRACE_SECONDS, _SETTLE_SECONDS))
        elif process is not self._launcher:
            self._sweeps.append(_Sweep(process.group, 0.0, _GROUP_SETTLE_SECONDS))
        elif self._owner in self._awaited:
            os.kill(self._owner.pid, signal.SIGKILL)


class _Process:
    """A process that the keeper waits for. `file` is its pidfd, readable once it ends; None if there are no pidfds."""

    def __init__(self, pid: int, group: str = "") -> None:
        self.pid, self.group = pid, group
        self.file: int | None = None
        with suppress(AttributeError, OSError):  # no pidfd, or the process has ended
            self.file = os.pidfd_open(pid)

    def is_gone(self) -> bool:
        """Whether the process has ended and its id is free."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's
            pass
        return False


class _Sweep:
    """The end of all processes with a token in their mark: SIGTERM, and SIGKILL `grace` seconds later.

    It is over when no process was found for `settle` seconds.
    """

    def __init__(self, token: str, grace: float, settle: float) -> None:
        self._token, self._grace, self._settle = token.encode(), grace, settle
        self._start = self._seen = time.monotonic()
        self._signaled: set[int] = set()

    def is_over(self, forks: list[int]) -> bool:
        """Signal the marked processes and `forks`."""
        now = time.monotonic()
        number = signal.SIGTERM if now - self._start < self._grace else signal.SIGKILL
        for pid in [*self._marked_processes(), *forks]:
            self._seen = now
            if number == signal.SIGKILL or pid not in self._signaled:
                self._signaled.add(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        return now - self._seen >= self._settle or now - self._start >= _KERNEL_SECONDS

    def _marked_processes(self) -> list[int]:
        prefix = f"{MARK}=".encode()
        return [
            pid
            for pid, variables in _environments()
            for entry in variables
            if entry.startswith(prefix) and self._token in entry[len(prefix) :].split(b"/")
        ]


def _environments() -> list[tuple[int, list[bytes]]]:
    """Return the id and the environment of each process of this user, as it was started."""
    if sys.platform != "linux":
        import subprocess

        listed = subprocess.run(["ps", "axeww", "-o", "pid=,command="], capture_output=True).stdout
        lines = [line.split() for line in listed.splitlines()]
        return [(int(words[0]), words[1:]) for words in lines if words]
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # it has ended, or is another user's
            found.append((int(name), file.read().split(b"\0")))
    return found


def main(pipe: int, owner: int, token: str) -> None:
    """Fork a keeper of the process `owner`, which started this process, and return."""
    keeper = Keeper(pipe, owner, token)
    if os.getppid() != owner or os.fork():
        return  # the owner has ended before it marked a child; or the fork is the keeper
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    keeper.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
