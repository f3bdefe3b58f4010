"""A reward that most pairs of answers differ in, so that a step of a weak model has a gradient."""

from __future__ import annotations

from typing import Any


def odd_characters(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """The share of characters with an odd code, among them the odd digits."""
    return sum(ord(character) % 2 for character in completions) / max(len(completions), 1)
