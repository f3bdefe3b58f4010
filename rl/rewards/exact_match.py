"""The reward of generated tasks whose answer is one exact text."""

from __future__ import annotations

from typing import Any


def exact_match_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    """1.0 where the completion, without spaces at its ends, is the gold answer, else 0.0."""
    return float(completions.strip() == str(answer).strip())
