"""Questions of reasoning_gym in chat form, after worked ones that show the form of an answer.

Without them SmolLM2-135M-Instruct answers in sentences, which earn nothing; with two of them about a quarter is right.
"""

from __future__ import annotations

from typing import Any

from archon.data.environments import parse_environment
from archon.rl.environments import reasoning_gym

__all__ = ["letter_counting", "syllogism"]

WORKED, TRAINED, HELD_OUT = 20, 1000, 200
"""The first rows of `train`, of which two with different answers are worked, and the numbers of rows of both splits."""


def letter_counting(split: str) -> list[dict[str, Any]]:
    """Return rows that ask how often a letter is in two to four words; `split` is train or test.

    Of the package's questions two thirds are answered by 1, which alone would be learned; here no answer is that of
    more than about a third.
    """
    task = "reasoning_gym:letter_counting?min_words=2&max_words=4&max_share=0.34"
    return _after_worked(task, "Answer with a number.", split)


def syllogism(split: str) -> list[dict[str, Any]]:
    """Return rows that ask whether a conclusion follows from two statements; `split` is train or test."""
    return _after_worked("reasoning_gym:syllogism", "Answer with Yes or No.", split)


def _after_worked(task: str, system: str, split: str) -> list[dict[str, Any]]:
    """Return the task's rows, each a conversation that begins with the same worked questions, which no row asks."""
    drawn = _rows(task, "train", WORKED + TRAINED)
    one = drawn[0]
    other = next(row for row in drawn[:WORKED] if row["response"] != one["response"])
    shown = [{"role": "system", "content": system}]
    for row in (one, other):
        shown += [_user(row), {"role": "assistant", "content": row["response"]}]
    asked = drawn[WORKED:] if split == "train" else _rows(task, split, HELD_OUT)
    return [row | {"prompt": [*shown, _user(row)]} for row in asked]


def _rows(task: str, split: str, size: int) -> list[dict[str, Any]]:
    name = parse_environment(f"{task}{'&' if '?' in task else '?'}size={size}")
    assert name is not None
    return reasoning_gym.rows(name, split, seed=0)


def _user(row: dict[str, Any]) -> dict[str, str]:
    return {"role": "user", "content": row["prompt"]}
