"""Rewards that misbehave in the way their completion asks for. Worker processes import this module: keep it light."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def obey(prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> Any:
    """`completions` names what to do; anything else is read as the reward."""
    if completions == "pid":
        return os.getpid()
    if completions == "sleep":
        time.sleep(data["seconds"])
        return 1.0
    if completions == "log":
        with Path(data["log"]).open("a") as log:
            log.write(f"{prompt}\n")
        return 1.0
    if completions in FAULTS:
        return FAULTS[completions](data)
    return float(completions)


def fail_until(prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, log: str, right: int) -> float:
    """Fail until it is called for the time number `right`; every call leaves a line in `log`."""
    with Path(log).open("a") as calls:
        calls.write("called\n")
    if len(Path(log).read_text().splitlines()) < right:
        raise ValueError("not yet")
    return 1.0


def _hang(data: dict[str, Any]) -> None:
    time.sleep(3600)


def _hang_in_c(data: dict[str, Any]) -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # catastrophic backtracking: never gives the interpreter's lock back


def _segfault(data: dict[str, Any]) -> None:
    ctypes.string_at(0)


def _raise(data: dict[str, Any]) -> None:
    raise KeyError("no such unit: furlong")


def _start_a_child_and_hang(data: dict[str, Any]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(data["log"]).write_text(str(child.pid))
    time.sleep(3600)


FAULTS: dict[str, Any] = {
    "hang": _hang,
    "hang in C": _hang_in_c,
    "segfault": _segfault,
    "os._exit": lambda data: os._exit(3),
    "raise": _raise,
    "sys.exit": lambda data: sys.exit(1),
    "start a child and hang": _start_a_child_and_hang,
    "return a lock": lambda data: threading.Lock(),
    "return a lambda": lambda data: lambda: 1.0,
    "return nan": lambda data: float("nan"),
    "return inf": lambda data: {"correct": 1.0, "length": float("inf")},
    "return None": lambda data: None,
    "return text": lambda data: "1.0",
    "return parts": lambda data: {"correct": 1.0, "format": 0.25},
    "count": lambda data: len(data),
    "torch?": lambda data: "torch" in sys.modules,
}


async def obey_async(prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> Any:
    """The same for an `async def` reward."""
    if completions == "hang":
        await asyncio.sleep(3600)
    if completions == "time out by itself":
        raise TimeoutError("the judge did not answer")
    if completions == "generator exit":
        raise GeneratorExit
    return obey(prompt, completions, prompt_ids, completion_ids, **data)


class Judge:
    """A reward with a state that is sent to the worker."""

    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    def __call__(self, prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        return self.bonus + len(completions)


def same(result: str, answer: str) -> float:
    """A reward with names of its own for its arguments."""
    return float(result == answer)


def told(prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **data: Any) -> dict[str, float]:
    """What it was given, as parts of a reward: lengths of texts and lists, -1 for None."""
    given = {"prompt": prompt, "completions": completions, "prompt_ids": prompt_ids, "completion_ids": completion_ids}
    return {name: -1.0 if value is None else float(len(value)) for name, value in (given | data).items()}


def keyword_prompt(result: str, gold: str, *, prompt: str) -> float:
    """The length of an argument that bears a documented name and is elsewhere."""
    return float(len(prompt))


def listed(completions: list[str], prompts: list[str], **columns: Any) -> list[float | None]:
    """A reward in TRL's form; an empty answer has none."""
    return [float(len(completion)) if completion else None for completion in completions]


async def listed_async(prompts: list[str], completions: list[str], answer: list[str]) -> list[float | None]:
    return [float(text == right) if text else None for text, right in zip(completions, answer, strict=True)]


def unlisted(completions: list[str], **columns: Any) -> float:
    return 1.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward in veRL's form."""
    return float(data_source == "sums" and solution_str == ground_truth)
