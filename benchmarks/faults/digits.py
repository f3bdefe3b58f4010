"""A reward that hardly any two answers have in common, so that every group has something to learn from."""

from __future__ import annotations

from typing import Any


def digits(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """Return the share of an answer's characters that are digits."""
    return sum(character.isdigit() for character in completions) / max(1, len(completions))
