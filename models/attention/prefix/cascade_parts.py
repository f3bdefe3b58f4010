"""Documents of cascade attention: runs of tokens and the contexts before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from archon.models.attention.packed.documents import cu_seqlens_from_lengths
from archon.parallel.transfer import to_device_async

Spans = Sequence[tuple[int, int]]
"""(first token, length) of consecutive tokens."""


class Bounds(NamedTuple):
    """Boundaries int32 [B + 1] of documents, and the longest length."""

    cu_seqlens: Tensor
    longest: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> Bounds:
        """Return the boundaries of documents of these lengths, on `device`."""
        return cls(cu_seqlens_from_lengths(lengths, device), max(lengths))


@dataclass(frozen=True)
class Part:
    """Documents with queries at tokens `query_rows` and keys at tokens `key_rows`, int64."""

    queries: Bounds
    keys: Bounds
    query_rows: Tensor
    key_rows: Tensor

    @classmethod
    def from_spans(cls, queries: Sequence[Spans], keys: Sequence[Spans], device: torch.device) -> Part:
        """Return the documents of these spans of tokens."""
        bounds, rows = list[Bounds](), list[Tensor]()
        for side in (queries, keys):
            bounds.append(Bounds.from_lengths([sum(length for _, length in spans) for spans in side], device))
            spans = [torch.arange(first, first + length) for document in side for first, length in document]
            rows.append(to_device_async(torch.cat(spans), device))
        return cls(bounds[0], bounds[1], rows[0], rows[1])


class Cascade:
    """Runs of tokens outside trees, numbered from the end of the trees; each part is built once.

    Args:
        parents: see `archon.models.attention.prefix.plan.SharedPrefixes`.
        in_trees: number of tokens in trees.
        device: device of the indices.
    """

    def __init__(self, parents: Sequence[tuple[int, int, int]], in_trees: int, device: torch.device) -> None:
        self.device = device
        self._spans, self._paths = list[tuple[int, int]](), list[tuple[int, ...]]()
        number: dict[int, int] = {}
        for run, (first, length, parent) in enumerate(parents):
            if first >= in_trees:
                number[run] = len(self._spans)
                above = () if parent < 0 else (*self._paths[number[parent]], number[parent])
                self._paths.append(above)
                self._spans.append((first - in_trees, length))
        self._expanded: dict[int, Part] = {}

    @cached_property
    def run_bounds(self) -> Bounds:
        """The runs as documents."""
        return Bounds.from_lengths([length for _, length in self._spans], self.device)

    @cached_property
    def contexts(self) -> Part | None:
        """Contexts, each with the queries of all runs after it; None without contexts."""
        after: dict[tuple[int, ...], list[int]] = {}
        for run, path in enumerate(self._paths):
            if path:
                after.setdefault(path, []).append(run)
        if not after:
            return None
        queries, keys = ([[self._spans[run] for run in runs] for runs in some] for some in (after.values(), after))
        return Part.from_spans(queries, keys, self.device)

    def expand_window(self, window: int) -> Part:
        """Return each run with its keys and the end of its context, as far as a window reaches."""
        if window not in self._expanded:
            keys = [[*self._tail(path, window - 1), run] for path, run in zip(self._paths, self._spans, strict=True)]
            self._expanded[window] = Part.from_spans([[span] for span in self._spans], keys, self.device)
        return self._expanded[window]

    def _tail(self, path: tuple[int, ...], tokens: int) -> list[tuple[int, int]]:
        """Return the spans of the last `tokens` tokens of a context, or all if it has fewer."""
        spans = list[tuple[int, int]]()
        for first, length in (self._spans[run] for run in reversed(path)):
            if visible := min(length, tokens):
                spans.append((first + length - visible, visible))
            tokens -= visible
        return spans[::-1]
