"""Attention over trees of documents: tokens with equal prefixes are computed once, and each sees its own path.

Short answers to one prompt are often the same, or differ only near the end. As a tree with one token per distinct
prefix they are one small document, with a mask of which tokens are on the path of which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from archon.models.attention import tree_kernel
from archon.models.attention.blockwise import group_heads, ungroup_heads
from archon.models.attention.spec import AttentionSpec, softmax_with_sinks
from archon.models.attention.tree_kernel import Routes
from archon.parallel.transfer import to_device_async

MAX_TREE_TOKENS = 128
"""Maximum tokens of a tree: all pairs are computed, which is cheaper than many small kernel calls only up to here."""

TreePaths = list[list[int]]
"""A tree as the path of each of its tokens: the tokens from the root to this one, which is last."""


def tree_paths(lengths: Sequence[int], shared: Sequence[int]) -> TreePaths:
    """Returns the tree of documents of these lengths; document i starts with shared[i] tokens of document i - 1."""
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
    """N trees of at most L tokens, padded to L; their U tokens are stored one tree after another.

    Attributes:
        rows: int64 [N, L], index of each token among the U; padding repeats one of them.
        gather_index: int64 [U], index of each token among the N * L.
        distance: int16 [N, L, L], how many tokens before token i token j is on its path, or -1 if it is not on it.
            Padding sees only itself.
        routes: the same without padding, on the host.
    """

    rows: Tensor
    gather_index: Tensor
    distance: Tensor
    routes: Routes

    @classmethod
    def from_paths(cls, trees: Sequence[TreePaths]) -> Trees:
        """Returns the batch of these trees, padded to the largest."""
        size = max(map(len, trees))
        counts = torch.tensor([len(paths) for paths in trees])
        valid = torch.arange(size) < counts.unsqueeze(1)
        rows = torch.where(valid, (counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(size), 0)
        routes, padded = Routes(trees), valid.flatten().nonzero().flatten()
        lengths = np.diff(routes.starts)
        distance = np.full((len(trees) * size, size), -1, dtype=np.int16)
        queries = padded.numpy().repeat(lengths)
        first = routes.trees[:-1].repeat(np.diff(routes.trees)).repeat(lengths)
        distance[queries, routes.paths - first] = routes.starts[1:].repeat(lengths) - 1 - np.arange(len(routes.paths))
        distances = torch.from_numpy(distance).unflatten(0, (len(trees), size))
        distances.diagonal(dim1=1, dim2=2).zero_()
        return cls(rows, padded, distances, routes)

    def to(self, device: torch.device) -> Trees:
        """Returns a copy on `device`."""
        rows, gather_index, distance = (
            to_device_async(x, device) for x in (self.rows, self.gather_index, self.distance)
        )
        return Trees(rows, gather_index, distance, self.routes)


def group_by_size(trees: Sequence[TreePaths]) -> list[list[TreePaths]]:
    """Returns trees, given smallest first, in groups to be padded together: sizes differ at most by a factor of 2, or
    are at most 16."""
    groups = groupby(trees, key=lambda paths: max(len(paths) - 1, 15).bit_length())
    return [list(group) for _, group in groups]


def tree_attention(q: Tensor, k: Tensor, v: Tensor, trees: Trees, spec: AttentionSpec) -> Tensor:
    """Returns attention along paths [U, H, E], computed in at least float32.

    Args:
        q: [U, H, D]; k: [U, G, D] and v: [U, G, E] with H a multiple of G.
    """
    if tree_kernel.applies(q, k, v, trees.routes, spec):
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
    scores = spec.capped(scores.view(batch, -1, size, size)) + bias.unsqueeze(1)
    p = softmax_with_sinks(scores, None if spec.sinks is None else spec.sinks.view(-1, 1))
    out = torch.bmm(p.reshape(len(q_NRSD), -1, size), v_NRSD.flatten(1, 2)).unflatten(1, (-1, size))
    return ungroup_heads(out, batch, q.dtype).flatten(0, 1).index_select(0, trees.gather_index)
