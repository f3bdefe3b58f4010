"""Reward shaping: the penalty of overlong answers."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from archon.schema.config import StrictModel


class OverlongConfig(StrictModel):
    """The penalty of answers near the limit of generation."""

    penalty: float = Field(0.0, ge=0, description="taken off the reward of an answer as long as allowed")
    buffer: float = Field(0.2, gt=0, le=1, description="last part of max_new_tokens over which it grows from 0")


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Returns DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): float [B], from 0 to −1.

    It is 0 up to `max_tokens − buffer` tokens, then falls linearly to −1 at `max_tokens`, and stays −1 beyond.

    Args:
        lengths: int [B], tokens of each answer.
        max_tokens: the limit of generation, L_max.
        buffer: the length of the interval before it, L_cache.
    """
    return ((max_tokens - buffer - lengths.float()) / max(buffer, 1)).clamp(-1.0, 0.0)
