"""Attention over trees of short documents: equal prefixes once, each token attends along its path.

Short answers to one prompt are often equal, or differ only near the end. As a tree with one token per distinct prefix
they are one small document, with a mask of each token's path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.packed.blockwise import group_heads, ungroup_heads
from archon.models.attention.spec import AttentionSpec, softmax_with_sinks
from archon.models.cpu import tree_kernel
from archon.models.cpu.tree_kernel import Routes
from archon.parallel.transfer import to_device_async

MAX_TREE_TOKENS = 128
"""Maximum tokens of a tree; up to here computing all pairs is cheaper than many small kernel calls."""

TreePaths = list[list[int]]
"""A tree as the path of each of its tokens: the tokens from the root to this one, which is last."""


def tree_paths(lengths: Sequence[int], shared: Sequence[int]) -> TreePaths:
    """Return the tree of documents of these lengths.

    Document i starts with shared[i] tokens of document i - 1.
    """
    paths: TreePaths = []
    path: list[int] = []
    for length, common in zip(lengths, shared, strict=True):
        path = path[:common]
        for _ in range(length - common):
            path = [*path, len(paths)]
            paths.append(path)
    return paths


@dataclass(frozen=True)
class Trees:
    """N trees of at most L tokens; their U tokens are stored one tree after another.

    Attributes:
        routes: paths of their tokens, on the host.
        device: device of the indices below, by default the CPU. They are built lazily: only matmuls need trees padded
            to L.
    """

    routes: Routes
    device: torch.device | None = None

    @classmethod
    def from_paths(cls, trees: Sequence[TreePaths]) -> Trees:
        """Return the batch of these trees."""
        return cls(Routes.from_trees(trees))

    @property
    def tokens(self) -> int:
        """Number of tokens U."""
        return int(self.routes.trees[-1])

    @cached_property
    def rows(self) -> Tensor:
        """int64 [N, L], index of each token among the U; padding repeats one of them."""
        counts, firsts = np.diff(self.routes.trees), self.routes.trees[:-1]
        column = np.arange(counts.max())
        return self._moved(np.where(column < counts[:, None], firsts[:, None] + column, 0))

    @cached_property
    def gather_index(self) -> Tensor:
        """int64 [U], index of each token among the N * L."""
        return self._moved(self._places())

    @cached_property
    def distance(self) -> Tensor:
        """int16 [N, L, L], distance from token i back to token j on its path, or -1 off the path.

        Padding attends only to itself.
        """
        routes, counts = self.routes, np.diff(self.routes.trees)
        size, lengths = int(counts.max()), np.diff(routes.starts)
        distance = np.full((len(counts) * size, size), -1, dtype=np.int16)
        first = routes.trees[:-1].repeat(counts).repeat(lengths)
        behind = routes.starts[1:].repeat(lengths) - 1 - np.arange(len(routes.paths))
        distance[self._places().repeat(lengths), routes.paths - first] = behind
        padded = distance.reshape(len(counts), size, size)
        padded[:, np.arange(size), np.arange(size)] = 0
        return self._moved(padded)

    def to(self, device: torch.device) -> Trees:
        """Return the same trees for `device`."""
        return Trees(self.routes, device)

    def _places(self) -> np.ndarray:
        counts = np.diff(self.routes.trees)
        skipped = np.arange(len(counts)) * counts.max() - self.routes.trees[:-1]
        return np.arange(self.tokens) + skipped.repeat(counts)

    def _moved(self, numbers: np.ndarray) -> Tensor:
        with torch.inference_mode(False):  # cached, and may be used in training later
            index = torch.from_numpy(numbers)
            return index if self.device is None else to_device_async(index, self.device)


def group_by_size(trees: Sequence[TreePaths]) -> list[list[TreePaths]]:
    """Group trees, sorted by size, for padding: sizes within a factor of 2, or at most 16."""
    groups = groupby(trees, key=lambda paths: max(len(paths) - 1, 15).bit_length())
    return [list(group) for _, group in groups]


def tree_attention(q: Tensor, k: Tensor, v: Tensor, trees: Trees, spec: AttentionSpec) -> Tensor:
    """Return attention along paths [U, H, E], computed in at least float32.

    Shapes: q [U, H, D], k [U, G, D] with H a multiple of G, v [U, G, E].
    """
    if tree_kernel.can_use(q, k, v, trees.routes.longest, spec):
        return tree_kernel.attend(q, k, v, trees.routes, spec)
    batch, size = trees.rows.shape
    groups = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = trees.rows.flatten()
    q_NRSD, k_NRSD, v_NRSD = (
        group_heads(x.index_select(0, rows).unflatten(0, (batch, size)), groups, wide) for x in (q, k, v)
    )
    hidden = trees.distance < 0
    if spec.window is not None:
        hidden = hidden | (trees.distance >= spec.window)
    bias = torch.zeros(hidden.shape, dtype=wide, device=q.device).masked_fill_(hidden, -torch.inf)
    scores = torch.bmm((q_NRSD * spec.scale).flatten(1, 2), k_NRSD.flatten(1, 2).transpose(1, 2))
    scores = spec.apply_soft_cap(scores.view(batch, -1, size, size)) + bias.unsqueeze(1)
    p = softmax_with_sinks(scores, None if spec.sinks is None else spec.sinks.view(-1, 1))
    out = torch.bmm(p.reshape(len(q_NRSD), -1, size), v_NRSD.flatten(1, 2)).unflatten(1, (-1, size))
    return ungroup_heads(out, batch, q.dtype).flatten(0, 1).index_select(0, trees.gather_index)
