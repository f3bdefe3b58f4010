"""Worker process of a reward: reads calls from a socket, runs them in order, and replies to each.

`pool.py` starts it as a fresh interpreter. A frame is a 4-byte big-endian length and a body: pickle to the worker, JSON
back. The trainer never unpickles data from a reward.

A call must not affect later calls of its process. `ProcessState` undoes the changes that it can, and a child that a
reward forks ends where its copy of the call returns. When the worker ends, `archon.schema.children` kills the processes
that its rewards left.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from archon.rl.rewards.result import RewardInvalid, as_reward
from archon.schema.children import end_with_parent

LENGTH = struct.Struct(">I")
MAX_REPLY_BYTES = 1 << 20  # as_reward's largest result takes a quarter: 256 parts with names of 200 characters
_MAX_TRACEBACK = 8000  # characters, from its end
_MAX_MESSAGE = 2000  # characters of an exception
# Saved here, because a reward may replace functions of these modules.
_dumps, _perf_counter, _getpid = json.dumps, time.perf_counter, os.getpid

in_worker = False  # AsyncRewardWrapper checks it: a script without `if __name__ == "__main__"` would make one here


def main(descriptor: int, parent: int) -> None:
    """Run until the parent closes the socket `descriptor`. `parent` is the parent's process id."""
    global in_worker
    in_worker = True
    end_with_parent(parent)
    with contextlib.suppress(OSError):  # short of memory, the kernel kills a reward, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.set_inheritable(descriptor, False)
    own_pid = _getpid()
    with open(descriptor, "rb") as calls:
        try:
            function, name = _load(_read_frame(calls))
        except BaseException:  # noqa: BLE001 - reported to the parent
            _reply(descriptor, {"event": "load_failed", "text": _traceback()})
            return
        _reply(descriptor, {"event": "ready"})
        state = ProcessState()  # importing the function may have changed it
        while frame := _read_frame(calls):
            result = _run(function, name, frame)
            if _getpid() != own_pid:
                os._exit(0)  # a child that the reward forked: its parent replies
            state.restore()
            _reply(descriptor, result)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed; a file of the reward cannot be in it
        return "/"


class ProcessState:
    """State of the process that a reward can change for later calls: folder, timer, output streams and built-ins."""

    def __init__(self) -> None:
        self._folder = _current_folder()
        self._output = [os.dup(number) for number in (1, 2)]
        self._names = vars(builtins)
        self._builtins = dict(self._names)
        self._restores = (os.chdir, os.dup2, signal.setitimer)
        self._open_streams()

    def restore(self) -> None:
        """Undo the changes of a call. New built-ins stay; a removed or replaced one is restored."""
        self._names.update(self._builtins)
        chdir, dup2, setitimer = self._restores
        setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(OSError):  # the folder was removed
            chdir(self._folder)
        for kept, number in zip(self._output, (1, 2), strict=True):
            dup2(kept, number)
        if [sys.stdout, sys.stderr] != self._streams or any(stream.closed for stream in self._streams):
            self._open_streams()

    def _open_streams(self) -> None:
        """Open the output streams without owning their descriptors. Lines are written at once: a kill loses none."""
        self._streams = [
            open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
            for number in (1, 2)
        ]
        sys.stdout, sys.stderr = self._streams


def _load(frame: bytes) -> tuple[Callable[..., Any], str]:
    setup = pickle.loads(frame)  # noqa: S301 - written by the parent, as below
    if setup["main"]:
        # The user's script defines the reward: import it under another name, like multiprocessing.
        from multiprocessing import spawn

        spawn.prepare(setup["main"])
    return pickle.loads(setup["function"]), setup["name"]  # noqa: S301


def _run(function: Callable[..., Any], name: str, frame: bytes) -> dict[str, Any]:
    started = _perf_counter()
    try:
        arguments, data = pickle.loads(frame)  # noqa: S301
        value = function(*arguments, **data)
        reward = as_reward(value, name)
        result: dict[str, Any] = {"event": "reward", "total": float(reward), "parts": reward.parts}
    except RewardInvalid as error:
        result = {"event": "invalid", "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - SystemExit costs its sample only
        result = {"event": "raised", "error": describe(error), "text": _traceback()}
    result["seconds"] = _perf_counter() - started
    return result


def describe(error: BaseException) -> str:
    """Return the type and the text of an exception; its `__str__` is the user's and may raise."""
    try:
        text = str(error)
    except Exception as inner:  # noqa: BLE001 - named in the message
        text = f"(its text cannot be read: {type(inner).__name__})"
    return f"{type(error).__name__}: {text[:_MAX_MESSAGE]}"


def _traceback() -> str:
    return traceback.format_exc()[-_MAX_TRACEBACK:]


def _read_frame(stream: BinaryIO) -> bytes:
    """Return the body of the next frame; an empty one if the parent has closed the socket."""
    try:
        header = stream.read(LENGTH.size)
        return stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""
    except ConnectionResetError:  # closed with a reply in it that the parent has not read
        return b""


def _reply(descriptor: int, message: dict[str, Any]) -> None:
    body = _dumps(message).encode()
    frame = memoryview(LENGTH.pack(len(body)) + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]
