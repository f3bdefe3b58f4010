"""Rewards that misbehave, in a module that the reward's worker processes can import."""

from __future__ import annotations

import os
import threading
import time
from typing import Any


def count_digits(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """A reward that varies within a group."""
    return float(sum(character.isdigit() for character in completions))


def scaled_digits(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, *, scale: float = 1.0, **data: Any
) -> float:
    return scale * count_digits(prompt, completions, prompt_ids, completion_ids)


class DigitReward:
    """A reward with state."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        return scaled_digits(prompt, completions, prompt_ids, completion_ids, scale=self.scale)


def constant(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return 1.0


async def sample_index(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """Run in the workflow's own process, where the episode's context can be asked."""
    from archon.rl import workflow_context

    index = workflow_context.get().sample_index
    assert index is not None
    workflow_context.record(seen=index)
    return float(index)


def in_parts(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> dict[str, float]:
    return {"format": 0.25, "length": float(len(completion_ids))}


def raise_on_even_length(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    if len(completion_ids) % 2 == 0:
        raise ValueError("even length")
    return 1.0


def always_raises(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    raise ZeroDivisionError("this reward is broken")


def dies_on_even_length(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    if len(completion_ids) % 2 == 0:
        os._exit(3)
    return 1.0


def hangs_on_even_length(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    if len(completion_ids) % 2 == 0:
        time.sleep(60)
    return 1.0


def nan_on_even_length(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return float("nan") if len(completion_ids) % 2 == 0 else 1.0


def unpicklable_on_even_length(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> Any:
    """What it returns, or raises, cannot be sent to another process."""
    if len(completion_ids) % 4 == 0:
        raise UnpicklableError
    return threading.Lock() if len(completion_ids) % 2 == 0 else 1.0


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("this exception cannot be pickled")


unpicklable = lambda prompt, completions, prompt_ids, completion_ids, **data: 1.0  # noqa: E731 (what it is here for)


def nearness(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any) -> float:
    """1 for the gold answer, less for each wrong character: a reward that an untrained model can already vary."""
    wrong = sum(a != b for a, b in zip(completions.ljust(4), answer.ljust(4), strict=False))
    return 1.0 - wrong / 4


def nothing(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return 0.0


def half(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return 0.5


def starts_with_seven(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return float(completions.startswith("7"))


def always_nan(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return float("nan")


def always_hangs(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    time.sleep(600)
    return 0.0
