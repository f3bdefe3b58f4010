"""Spans of consecutive numbers, as documents and runs of tokens are of a pack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bounds(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return where spans of these lengths, one after another from 0 on, begin, and where the last one ends: int64
    [n + 1].
    """
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def ranges(firsts: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the numbers from each of `firsts` on, as many as its length, one after another: int64."""
    counts = np.asarray(lengths, dtype=np.int64)
    ends = bounds(counts)
    return np.arange(ends[-1]) + (np.asarray(firsts, dtype=np.int64) - ends[:-1]).repeat(counts)
