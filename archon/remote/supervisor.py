"""Run a server that ends with its trainer: supervisor.py [--detached | --heartbeat FILE SECONDS] -- COMMAND ….

Standard input is a pipe, and the trainer holds its other end. When the trainer ends, also by kill -9, the pipe closes,
and the supervisor stops the command's process group. With `--heartbeat`, a file that the trainer touches replaces the
pipe. In a Ray actor, Ray kills the actor's children before they can stop their own children, so the supervisor detaches
itself from the actor (`--detached`). This file is run by its path and needs only Python.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the command until it or the trainer ends. Return its exit status, or 128 + signal if it was killed."""
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    if options == ["--detached"]:
        if (child_pid := os.fork()) != 0:
            return _status(os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]))
        os.setsid()
    heartbeat = (Path(options[1]), float(options[2])) if options[:1] == ["--heartbeat"] else None
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        stopped.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_supervisor)
    while child.poll() is None and not stopped:
        if _trainer_ended(heartbeat):
            break
    return _end(child)


def _trainer_ended(heartbeat: tuple[Path, float] | None) -> bool:
    """Wait for `POLL_SECONDS` and return whether the trainer has ended."""
    if heartbeat is None:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_SECONDS)
        return bool(readable) and not os.read(sys.stdin.fileno(), 1)
    time.sleep(POLL_SECONDS)
    path, seconds = heartbeat
    try:
        return time.time() - path.stat().st_mtime > seconds
    except OSError:  # the trainer removed its folder
        return True


def _end(child: subprocess.Popen[bytes]) -> int:
    """Stop the command's process group by SIGTERM, then by SIGKILL."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
    return _status(child.wait())


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _die_with_supervisor() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
