"""A reward that any two sentences differ in, so that every step of a weak model has a gradient."""

from __future__ import annotations

from typing import Any


def vowels(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """The share of vowels in an answer."""
    return sum(letter in "aeiouAEIOU" for letter in completions) / max(len(completions), 1)
