"""Rewards that change their process or write to the trainer's descriptors. Worker processes import this module."""

from __future__ import annotations

import asyncio
import builtins
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def obey(prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> Any:
    """`completions` names what to do; anything else is read as the reward."""
    return ACTIONS[completions]() if completions in ACTIONS else float(completions)


async def ignore_cancellation(prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> Any:
    """Sleep for `completions` seconds, however often it is canceled."""
    end = time.monotonic() + float(completions)
    while (left := end - time.monotonic()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            continue
    return 1.0


def _fork_and_return() -> float:
    os.fork()
    return 9.0


def _write_to_every_descriptor(body: bytes) -> Callable[[], float]:
    def write() -> float:
        # A test process has many open files, and a worker's socket keeps its number.
        for descriptor in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
            try:
                os.write(descriptor, body)
            except OSError:
                continue
        return 9.0

    return write


def _print_a_lot() -> float:
    for _ in range(200):
        print("x" * 100_000)
    os.write(2, b"y" * 1_000_000)
    return 9.0


def _spoil() -> float:
    vars(builtins)["len"] = lambda _: 0
    time.perf_counter = lambda: float("nan")
    signal.alarm(1)
    os.chdir("/")
    sys.stdout.close()
    os.close(2)
    return 9.0


def _rely_on_the_process() -> float:
    print("the stream is open", flush=True)
    os.write(2, b"")
    time.sleep(1.2)
    return float(len(Path.cwd().name) == len(os.path.basename(os.environ["PWD_OF_RUN"])) > 0)


def _start_children() -> float:
    for _ in range(50):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    return 9.0


class _WithoutText(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise(error: BaseException) -> Any:
    raise error


ACTIONS: dict[str, Callable[[], Any]] = {
    "fork and return": _fork_and_return,
    "reply with junk": _write_to_every_descriptor(struct.pack(">I", 5) + b"junk!"),
    "announce 4 GB": _write_to_every_descriptor(struct.pack(">I", 2**32 - 1) + b"x" * 1000),
    "print a lot": _print_a_lot,
    "spoil": _spoil,
    "rely on the process": _rely_on_the_process,
    "start children": _start_children,
    "raise 50 MB": lambda: _raise(ValueError("e" * 50_000_000)),
    "raise without a text": lambda: _raise(_WithoutText()),
    "close all descriptors": lambda: os.closerange(0, os.sysconf("SC_OPEN_MAX")) or 9.0,
    "forget to await": lambda: ignore_cancellation("", "0", [], []),
    "too many parts": lambda: {str(number): 1.0 for number in range(100_000)},
    "a long name": lambda: {"n" * 1_000_000: 1.0},
    "complex": lambda: np.complex128(1 + 2j),
    "text of NumPy": lambda: np.str_("1.0"),
    "beyond float32": lambda: 1e300,
    "a large integer": lambda: 10**400,
}
