"""Spans of consecutive token indices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bounds(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the boundaries int64 [n + 1] of consecutive spans with these lengths, from 0."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def ranges(firsts: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the concatenated ranges first .. first + length - 1: int64."""
    counts = np.asarray(lengths, dtype=np.int64)
    ends = bounds(counts)
    return np.arange(ends[-1]) + (np.asarray(firsts, dtype=np.int64) - ends[:-1]).repeat(counts)
