"""Worker process of a reward: reads calls from a socket, runs them in order, and replies to each.

`pool.py` starts it as a fresh interpreter. A frame is a 4-byte big-endian length and a body: pickle to the worker, JSON
back. The trainer never unpickles data from a reward.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from archon.rl.rewards.result import RewardInvalid, as_reward

LENGTH = struct.Struct(">I")
_MAX_TRACEBACK = 8000  # characters, from its end

in_worker = False  # AsyncRewardWrapper checks it: a script without `if __name__ == "__main__"` would make one here


def main(descriptor: int, parent: int) -> None:
    """Run until the parent closes the socket `descriptor`. `parent` is the parent's process id."""
    global in_worker
    in_worker = True
    _exit_with_parent(parent)
    os.set_inheritable(descriptor, False)
    with open(descriptor, "rb") as calls:
        try:
            function, name = _load(_read_frame(calls))
        except BaseException:  # noqa: BLE001 - reported to the parent
            _reply(descriptor, {"event": "load_failed", "text": _traceback()})
            return
        _reply(descriptor, {"event": "ready"})
        while frame := _read_frame(calls):
            _reply(descriptor, _run(function, name, frame))


def _exit_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, even during a call that never returns."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _load(frame: bytes) -> tuple[Callable[..., Any], str]:
    setup = pickle.loads(frame)  # noqa: S301 - written by the parent, as below
    if setup["main"]:
        # The user's script defines the reward: import it under another name, like multiprocessing.
        from multiprocessing import spawn

        spawn.prepare(setup["main"])
    return pickle.loads(setup["function"]), setup["name"]  # noqa: S301


def _run(function: Callable[..., Any], name: str, frame: bytes) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        arguments, data = pickle.loads(frame)  # noqa: S301
        value = function(*arguments, **data)
        reward = as_reward(value, name)
        result: dict[str, Any] = {"event": "reward", "total": float(reward), "parts": reward.parts}
    except RewardInvalid as error:
        result = {"event": "invalid", "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - SystemExit costs its sample only
        result = {"event": "raised", "error": f"{type(error).__name__}: {error}", "text": _traceback()}
    result["seconds"] = time.perf_counter() - started
    return result


def _traceback() -> str:
    return traceback.format_exc()[-_MAX_TRACEBACK:]


def _read_frame(stream: BinaryIO) -> bytes:
    header = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""


def _reply(descriptor: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    frame = memoryview(LENGTH.pack(len(body)) + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]
