"""Documents that branch: every token that begins alike with another's document stands once, and sees its own path.

Short answers to one prompt are often the same, or the same but for their end. Laid out as a tree, a token for each
distinct beginning, they go through attention as one small document with a mask of who stands on whose path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from archon.models.attention.blockwise import grouped, ungrouped

MAX_TREE_TOKENS = 128
"""Of one tree: its attention computes all pairs of tokens, which is cheaper than many small calls only up to here."""


@dataclass
class Tree:
    """What documents make of a tree: of each token its depth and, from the root to itself, its path."""

    paths: list[list[int]] = field(default_factory=list)

    def add(self, common: int, length: int, before: Sequence[int]) -> list[int]:
        """The tokens of one more document, which shares `common` tokens with the document `before`."""
        path = list(before[:common])
        for _ in range(length - common):
            path.append(len(self.paths))
            self.paths.append(path.copy())
        return path


@dataclass(frozen=True)
class Trees:
    """N trees of at most L tokens, of the same order of size; their U tokens stand one tree after the other.

    Args:
        rows: int64 [N, L], each place's token among the U; padding repeats one of them.
        gather_index: int64 [U], each token's place among the N * L.
        distance: int16 [N, L, L], how many tokens before place i place j stands on its path; -1 where it does not. A
            padded place sees itself alone.
    """

    rows: Tensor
    gather_index: Tensor
    distance: Tensor

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> Trees:
        """Trees side by side, padded to the largest."""
        size = max(len(tree.paths) for tree in trees)
        counts = torch.tensor([len(tree.paths) for tree in trees])
        real = torch.arange(size) < counts.unsqueeze(1)
        rows = torch.where(real, (counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(size), 0)
        # (place of the token that sees, place of the one it sees, distance), as lists: one assignment for them all.
        seers, seen, distances = list[int](), list[int](), list[int]()
        for number, tree in enumerate(trees):
            for place, path in enumerate(tree.paths):
                seers += [number * size + place] * len(path)
                seen += path
                distances += range(len(path) - 1, -1, -1)
        distance = torch.full((len(trees) * size, size), -1, dtype=torch.int16)
        distance[torch.tensor(seers), torch.tensor(seen)] = torch.tensor(distances, dtype=torch.int16)
        distance = distance.unflatten(0, (len(trees), size))
        distance.diagonal(dim1=1, dim2=2).zero_()
        return cls(rows, real.flatten().nonzero().flatten(), distance)

    @property
    def n_tokens(self) -> int:
        """U."""
        return self.gather_index.numel()

    def to(self, device: torch.device) -> Trees:
        """The same on `device`."""
        return Trees(self.rows.to(device), self.gather_index.to(device), self.distance.to(device))


def by_size(trees: Sequence[Tree]) -> list[list[Tree]]:
    """Trees, given smallest first, in runs that may be padded to their largest: none is less than half of it, or all of
    them are tiny."""

    def step(tree: Tree) -> int:
        return max(len(tree.paths) - 1, 15).bit_length()

    return [list(alike) for _, alike in groupby(trees, key=step)]


def tree_attention(q: Tensor, k: Tensor, v: Tensor, trees: Trees, *, window: int | None, scale: float) -> Tensor:
    """Attention along paths, by plain products in at least float32: q [U, H, D], k and v [U, G, D] to [U, H, D]."""
    batch, size = trees.rows.shape
    heads = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    places = trees.rows.flatten()
    q_NRSD, k_NRSD, v_NRSD = (
        grouped(x.index_select(0, places).unflatten(0, (batch, size)), heads, wide) for x in (q, k, v)
    )
    hidden = trees.distance < 0
    if window is not None:
        hidden = hidden | (trees.distance >= window)
    bias = torch.zeros(hidden.shape, dtype=wide, device=q.device).masked_fill_(hidden, -torch.inf)
    scores = torch.bmm((q_NRSD * scale).flatten(1, 2), k_NRSD.flatten(1, 2).transpose(1, 2))
    scores = scores.view(batch, -1, size, size) + bias.unsqueeze(1)
    out = torch.bmm(scores.softmax(-1).view(len(q_NRSD), -1, size), v_NRSD.flatten(1, 2)).view(q_NRSD.shape)
    return ungrouped(out, batch, q.dtype).flatten(0, 1).index_select(0, trees.gather_index)
