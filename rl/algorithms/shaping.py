"""What is taken off a reward before advantages are computed from it."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft punishment of answers near the limit (arXiv 2503.14476, equation 13), float [B], 0 to −1.

    Up to `max_tokens − buffer` tokens nothing, then linearly to −1 at `max_tokens`, and −1 beyond.

    Args:
        lengths: int [B], tokens of each answer.
        max_tokens: the limit of generation, L_max.
        buffer: the tokens before it, L_cache.
    """
    return ((max_tokens - buffer - lengths.float()) / max(buffer, 1)).clamp(-1.0, 0.0)
