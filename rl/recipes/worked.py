"""Questions of reasoning_gym in chat form, after two worked examples of the answer form.

Without the examples, SmolLM2-135M-Instruct answers in sentences and scores 0; with them, about a quarter is right.
"""

from __future__ import annotations

from typing import Any

from archon.data.environments import parse_environment
from archon.rl.environments import reasoning_gym

__all__ = ["letter_counting", "syllogism"]

WORKED, TRAINED, HELD_OUT = 20, 1000, 200
"""Rows of `train` reserved for the two examples, and the sizes of both splits."""


def letter_counting(split: str) -> list[dict[str, Any]]:
    """Return rows that ask for letter counts in two to four words; `split` is train or test.

    Two thirds of the package's questions have the answer 1, a shortcut to learn; `max_share` caps each answer at about
    a third.
    """
    task = "reasoning_gym:letter_counting?min_words=2&max_words=4&max_share=0.34"
    return _after_worked(task, "Answer with a number.", split)


def syllogism(split: str) -> list[dict[str, Any]]:
    """Return rows that ask whether a conclusion follows from two statements; `split` is train or test."""
    return _after_worked("reasoning_gym:syllogism", "Answer with Yes or No.", split)


def _after_worked(task: str, system: str, split: str) -> list[dict[str, Any]]:
    """Return the task's rows as conversations that begin with the same two worked examples."""
    drawn = _rows(task, "train", WORKED + TRAINED)
    first = drawn[0]
    second = next(row for row in drawn[:WORKED] if row["response"] != first["response"])
    examples = [{"role": "system", "content": system}]
    for row in (first, second):
        examples += [_user(row), {"role": "assistant", "content": row["response"]}]
    questions = drawn[WORKED:] if split == "train" else _rows(task, split, HELD_OUT)
    return [row | {"prompt": [*examples, _user(row)]} for row in questions]


def _rows(task: str, split: str, size: int) -> list[dict[str, Any]]:
    name = parse_environment(f"{task}{'&' if '?' in task else '?'}size={size}")
    assert name is not None
    return reasoning_gym.rows(name, split, seed=0)


def _user(row: dict[str, Any]) -> dict[str, str]:
    return {"role": "user", "content": row["prompt"]}
