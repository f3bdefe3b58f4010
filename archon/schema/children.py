"""Child processes and private folders that end with this process, however it ends.

A small process, the keeper (`keeper.py`), waits for the end of this process. It then ends every process that has this
process's mark in its environment, and removes the registered folders. Children inherit the mark. The keeper therefore
also finds children of children, orphans, and processes in other sessions (torchrun starts each rank in one). It misses
only a process that clears its environment.

- `start_child` starts a marked child. Its descendants are killed as soon as it ends, even if this process lives on.
- `child_environment` is the environment of a marked child.
- `marked_environment` marks all children that libraries and user code start in a block.
- `end_with_launcher` ends this process with the process that started it.
- `end_with_parent` asks Linux for the same, without the keeper: at once, and even if the keeper was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from archon.schema import keeper
from archon.schema.keeper import MARK, POLL_SECONDS

_PR_SET_PDEATHSIG = 1


class _Keeper:
    """The keeper of this process, from the side of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        token = f"{self.owner}-{os.urandom(8).hex()}"
        inherited = os.environ.get(MARK)
        self.mark = f"{inherited}/{token}" if inherited else token
        self._lock = threading.Lock()
        read_end, self.write_end = os.pipe()
        try:
            # This child forks the keeper and exits at once.
            subprocess.run(
                [sys.executable, "-I", "-S", keeper.__file__, str(read_end), str(self.owner), token],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a reader of this process's output need not wait for the keeper
                stderr=subprocess.DEVNULL,
                pass_fds=(read_end,),
                cwd="/",
                env={name: value for name, value in os.environ.items() if name != MARK},
                start_new_session=True,  # Ctrl-C and kills of this process's group do not reach it
                check=True,
            )
        except BaseException:
            os.close(self.write_end)
            raise
        finally:
            os.close(read_end)

    def send(self, record: bytes) -> None:
        with self._lock, suppress(BrokenPipeError):  # somebody killed the keeper
            os.write(self.write_end, record + b"\0")


_current: _Keeper | None = None
_keeper_lock = threading.Lock()
_reports_forks = False


def _running_keeper() -> _Keeper:
    """Return the keeper of this process; start it at the first call, and again after a fork."""
    global _current
    with _keeper_lock:
        if _current is None or _current.owner != os.getpid():
            _current = _Keeper()
        return _current


def child_environment(group: str | None = None) -> dict[str, str]:
    """Return the environment for a child: it and all its descendants end with this process.

    Args:
        group: unique name for the child and its descendants, for `kill_group_after`.
    """
    mark = _running_keeper().mark
    return os.environ | {MARK: f"{mark}/{group}" if group else mark}


def start_child(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a child. It ends with this process, and its descendants are killed as soon as it ends.

    Args:
        command: program and arguments.
        environment: additional environment variables.
        options: arguments of `subprocess.Popen`.
    """
    group = os.urandom(8).hex()
    child = subprocess.Popen(command, env=child_environment(group) | dict(environment or {}), **options)
    kill_group_after(child.pid, group)
    return child


@contextmanager
def marked_environment(*, forks: bool = False) -> Iterator[None]:
    """Mark `os.environ` in the block, for children that libraries and user code start; see `child_environment`.

    Args:
        forks: also end forks of this process, which have the environment that it was started with. This holds from now
            on, also after the block.
    """
    global _reports_forks
    before = os.environ.get(MARK)
    os.environ[MARK] = _running_keeper().mark
    _reports_forks |= forks
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = before


def _after_fork() -> None:
    global _keeper_lock
    _keeper_lock = threading.Lock()  # another thread of the parent may hold the old one
    if _reports_forks and _current is not None:
        with suppress(OSError):  # somebody killed the keeper
            os.write(_current.write_end, b"f%d\0" % os.getpid())


os.register_at_fork(after_in_child=_after_fork)


def kill_group_after(pid: int, group: str) -> None:
    """Have the keeper kill all processes of `group` when the child `pid` ends, even if it is killed."""
    _running_keeper().send(b"g%d %s" % (pid, group.encode()))


def end_with_launcher() -> None:
    """Have the keeper kill this process when its parent ends, and then the processes that this one started."""
    _running_keeper().send(b"p%d" % os.getppid())


def keep_folder(*paths: Path) -> None:
    """Have the keeper remove the folders when this process ends. Call it before they exist, so that none is missed."""
    for path in paths:
        _running_keeper().send(b"+" + os.fsencode(path.absolute()))


def forget_folder(*paths: Path) -> None:
    """Take back `keep_folder`."""
    for path in paths:
        _running_keeper().send(b"-" + os.fsencode(path.absolute()))


def end_with_parent(parent: int | None = None) -> None:
    """Let the operating system kill this process when its parent ends, even during a call that never returns.

    On Linux the signal comes when the *thread* that started this process ends: start children from a thread that lives
    as long as they may. Other systems have no such signal; a thread looks for the parent there.

    Args:
        parent: process id of the parent, to notice that it ended before this call; by default the current parent.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_exit_after, args=[parent], name="archon-parent", daemon=True).start()


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)
