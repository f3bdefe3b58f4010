"""Documents that begin alike: what they begin with is computed once.

The answers to one prompt, or examples behind one system prompt, repeat it token by token. Under causal attention the
hidden states of equal beginnings are equal, so that the layers need only one copy of each and, of every document, the
rest. (For reinforcement: Prefix Grouper, Liu et al. 2025, arXiv:2506.05433.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.batched import batched_attention
from archon.models.attention.tree import MAX_TREE_TOKENS, Tree, Trees, by_size, tree_attention

MIN_SAVED_FRACTION = 0.1
"""The part of a pack's tokens that sharing must save."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Which of a pack's T tokens are computed, U of them: first those of the trees, then the shared beginnings, the
    shortest first, then what follows them in each document, by the length of the beginning and then by its own.

    Args:
        rows: int64 [U], the computed tokens among those of the pack.
        gather_index: int64 [T], where each token of the pack finds its hidden state among the computed.
        trees: short documents that begin alike, branching wherever they differ.
        prefixes: (length, how many) of the beginnings of all others.
        endings: (length of the beginning, own length, int64 [n] which of the beginnings of that length) of the rest; a
            document that shares nothing has a beginning of length 0.
    """

    rows: Tensor
    gather_index: Tensor
    trees: tuple[Trees, ...]
    prefixes: tuple[tuple[int, int], ...]
    endings: tuple[tuple[int, int, Tensor], ...]

    def to(self, device: torch.device) -> SharedPrefixes:
        """The same with its indices on `device`."""
        endings = tuple((prefix, own, numbers.to(device)) for prefix, own, numbers in self.endings)
        trees = tuple(tree.to(device) for tree in self.trees)
        return SharedPrefixes(self.rows.to(device), self.gather_index.to(device), trees, self.prefixes, endings)


@dataclass
class _Group:
    """Documents, by number, that begin with the same `prefix` tokens; a document alone has a beginning of 0. `common`:
    how many each shares with the one before it, the first none."""

    prefix: int
    members: list[int]
    common: list[int]

    def tree(self, lengths: Sequence[int]) -> Tree:
        """The documents as one tree, and nothing else."""
        tree, path = Tree(), list[int]()
        for document, common in zip(self.members, self.common, strict=True):
            path = tree.add(common, lengths[document], path)
        return tree

    def tree_tokens(self, lengths: Sequence[int]) -> int:
        """How many tokens that tree has."""
        return sum(lengths[d] - common for d, common in zip(self.members, self.common, strict=True))


class _Layout:
    """Where computed tokens come from and where those of the pack find them, as it fills up."""

    def __init__(self, starts: np.ndarray) -> None:
        self._starts = starts
        self.gather_index = np.empty(starts[-1], dtype=np.int64)
        self._rows: list[np.ndarray] = []
        self._at = 0

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate(self._rows)

    def emit(self, document: int, first: int, stop: int) -> None:
        """The next computed tokens are first ... stop - 1 of this document."""
        place = self._starts[document]
        self.alias_rows(document, first, stop, self._at)
        self._rows.append(np.arange(place + first, place + stop))
        self._at += stop - first

    def alias_rows(self, document: int, first: int, stop: int, at: int) -> None:
        """These tokens of a document are computed from `at` on."""
        place = self._starts[document]
        self.gather_index[place + first : place + stop] = np.arange(at, at + stop - first)

    def emit_tree(self, group: _Group, lengths: Sequence[int]) -> None:
        """Every token of a group's tree."""
        before = 0
        for document, common in zip(group.members, group.common, strict=True):
            if common:
                seen = self.gather_index[self._starts[before] : self._starts[before] + common]
                self.gather_index[self._starts[document] : self._starts[document] + common] = seen
            self.emit(document, common, lengths[document])
            before = document

    def emit_prefix(self, group: _Group) -> None:
        """The common beginning of a group."""
        at = self._at
        self.emit(group.members[0], 0, group.prefix)
        for document in group.members[1:]:
            self.alias_rows(document, 0, group.prefix, at)


def shared_prefixes(tokens: Tensor, lengths: Sequence[int]) -> SharedPrefixes | None:
    """What the documents of a pack begin alike with; None where that would save less than `MIN_SAVED_FRACTION` of it.

    Args:
        tokens: int64 [T] on the CPU.
        lengths: of the documents, T in all.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)])
    groups, short = list[_Group](), list[_Group]()
    for group in _groups(tokens.numpy(), lengths, starts):
        (short if group.tree_tokens(lengths) <= MAX_TREE_TOKENS else groups).append(group)
    saved = sum(group.prefix * (len(group.members) - 1) for group in groups)
    saved += sum(sum(group.common) for group in short)
    if saved < MIN_SAVED_FRACTION * tokens.numel():
        return None
    layout = _Layout(starts)
    short.sort(key=lambda group: group.tree_tokens(lengths))
    for group in short:
        layout.emit_tree(group, lengths)
    trees = tuple(Trees.of(alike) for alike in by_size([group.tree(lengths) for group in short]))
    groups.sort(key=lambda group: group.prefix)
    counts = dict[int, int]()
    documents: list[tuple[int, int, int, int]] = []  # beginning, own length, number of the beginning, document
    for group in groups:
        number = counts.get(group.prefix, 0)
        counts[group.prefix] = number + 1
        documents += [(group.prefix, lengths[d] - group.prefix, number, d) for d in group.members]
        layout.emit_prefix(group)
    documents = sorted(entry for entry in documents if entry[1])
    for prefix, own, _, document in documents:
        layout.emit(document, prefix, prefix + own)
    endings = []
    for (prefix, own), alike in groupby(documents, key=lambda entry: entry[:2]):
        endings.append((prefix, own, torch.tensor([number for _, _, number, _ in alike])))
    prefixes = tuple((prefix, count) for prefix, count in counts.items() if prefix)
    return SharedPrefixes(
        torch.from_numpy(layout.rows), torch.from_numpy(layout.gather_index), trees, prefixes, tuple(endings)
    )


def _groups(tokens: np.ndarray, lengths: Sequence[int], starts: np.ndarray) -> list[_Group]:
    """Documents by their common beginnings.

    They are sorted, which puts those that begin alike side by side, and a group grows as long as that saves more.
    """
    documents = [tokens[starts[d] : starts[d + 1]] for d in range(len(lengths))]
    order = sorted(range(len(lengths)), key=lambda d: documents[d].tobytes())
    groups = [_Group(0, order[:1], [0])]
    for before, document in pairwise(order):
        group = groups[-1]
        common = _common(documents[before], documents[document])
        shorter = common if len(group.members) == 1 else min(group.prefix, common)
        if shorter * len(group.members) > group.prefix * (len(group.members) - 1):
            group.prefix = shorter
            group.members.append(document)
            group.common.append(common)
        else:
            groups.append(_Group(0, [document], [0]))
    return groups


def _common(one: np.ndarray, other: np.ndarray) -> int:
    n = min(len(one), len(other))
    differ = one[:n] != other[:n]
    return int(differ.argmax()) if differ.any() else n


@torch.compiler.disable
def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, *, window: int | None, scale: float
) -> Tensor:
    """Causal attention of the computed tokens: q [U, H, D], k and v [U, G, D] to [U, H, D]."""
    sizes = [trees.n_tokens for trees in shared.trees]
    sizes += [length * count for length, count in shared.prefixes]
    sizes += [own * len(numbers) for _, own, numbers in shared.endings]
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    outs: list[Tensor] = []
    beginnings: dict[int, tuple[Tensor, Tensor]] = {}
    for trees, (qs, ks, vs) in zip(shared.trees, parts, strict=False):
        outs.append(tree_attention(qs, ks, vs, trees, window=window, scale=scale))
    for (length, count), (qs, ks, vs) in zip(shared.prefixes, parts, strict=False):
        qs, ks, vs = (x.unflatten(0, (count, length)) for x in (qs, ks, vs))
        beginnings[length] = ks, vs
        outs.append(batched_attention(qs, ks, vs, window=window, scale=scale).flatten(0, 1))
    for (prefix, own, numbers), (qs, ks, vs) in zip(shared.endings, parts, strict=True):
        qs, ks, vs = (x.unflatten(0, (len(numbers), own)) for x in (qs, ks, vs))
        if prefix:
            ks, vs = (
                torch.cat([x.index_select(0, numbers), y], dim=1)
                for x, y in zip(beginnings[prefix], (ks, vs), strict=True)
            )
        outs.append(batched_attention(qs, ks, vs, window=window, scale=scale).flatten(0, 1))
    return torch.cat(outs)
