"""Run a server of a Slurm job that ends with its trainer: supervisor.py --heartbeat FILE SECONDS -- COMMAND ….

The trainer runs on another machine and touches the file. When it has not touched the file for so many seconds, or
removed it, the supervisor stops the command's process group. This file is run by its path and needs only Python.
"""

from __future__ import annotations

import ctypes
import os
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
    (_, path, seconds), command = arguments[:split], arguments[split + 1 :]
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        stopped.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_supervisor)
    while child.poll() is None and not stopped:
        time.sleep(POLL_SECONDS)
        if _trainer_ended(Path(path), float(seconds)):
            break
    return _end(child)


def _trainer_ended(heartbeat: Path, seconds: float) -> bool:
    try:
        return time.time() - heartbeat.stat().st_mtime > seconds
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
