"""Shared prefixes: tokens that several documents start with are computed once.

The answers to one prompt, or examples after one system prompt, repeat it token by token. Under causal attention equal
prefixes have equal hidden states, so the layers need one copy of each prefix, and the rest of every document (for
reinforcement learning: Prefix Grouper, Liu et al. 2025, arXiv:2506.05433).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.blockwise import batched_attention
from archon.models.attention.spec import AttentionSpec
from archon.models.attention.tree import MAX_TREE_TOKENS, Trees, group_by_size, tree_attention, tree_paths

MIN_SAVED_FRACTION = 0.1
"""Minimum fraction of a pack's tokens that sharing must save."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Which U of a pack's T tokens are computed, and which hidden state each token uses.

    Computed are the tokens of trees, then the shared prefixes, shortest first, then the suffix of each document, by the
    length of its prefix and its own.

    Attributes:
        rows: int64 [U], the computed tokens as indices into the pack.
        gather_index: int64 [T], the index of each token's hidden state among the computed ones.
        trees: groups of short documents with common prefixes, which branch wherever they differ.
        prefixes: (length, count) of the shared prefixes of all other documents.
        suffixes: (length of the prefix, own length, int64 [n] index of the prefix among those of its length) of the
            other documents' suffixes; a document that shares nothing has a prefix of length 0.
    """

    rows: Tensor
    gather_index: Tensor
    trees: tuple[Trees, ...]
    prefixes: tuple[tuple[int, int], ...]
    suffixes: tuple[tuple[int, int, Tensor], ...]

    def to(self, device: torch.device) -> SharedPrefixes:
        """Returns a copy whose indices are on `device`."""
        suffixes = tuple((prefix, own, indices.to(device)) for prefix, own, indices in self.suffixes)
        trees = tuple(tree.to(device) for tree in self.trees)
        return SharedPrefixes(self.rows.to(device), self.gather_index.to(device), trees, self.prefixes, suffixes)


@dataclass
class _Group:
    """Documents, by index, whose first `prefix` tokens are equal; 0 for a document that shares nothing.

    `common[i]` is the number of tokens that document i of the group shares with the one before it; 0 for the first.
    """

    prefix: int
    documents: list[int]
    common: list[int]

    def tree_tokens(self, lengths: Sequence[int]) -> int:
        """Returns the number of tokens of the group as a tree."""
        return sum(lengths[document] for document in self.documents) - sum(self.common)


def shared_prefixes(tokens: Tensor, lengths: Sequence[int]) -> SharedPrefixes | None:
    """Returns the shared prefixes of a pack's documents; None if they save less than `MIN_SAVED_FRACTION` of it.

    Args:
        tokens: int64 [T] on the CPU.
        lengths: lengths of the documents, with sum T.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)])
    trees, groups = list[_Group](), list[_Group]()
    for group in _group_documents(tokens.numpy(), lengths, starts):
        (trees if group.tree_tokens(lengths) <= MAX_TREE_TOKENS else groups).append(group)
    trees.sort(key=lambda group: group.tree_tokens(lengths))
    groups.sort(key=lambda group: group.prefix)

    source = np.arange(tokens.numel())  # the computed token whose hidden state each token uses
    rows: list[np.ndarray] = []
    for group in trees:
        previous = 0
        for document, common in zip(group.documents, group.common, strict=True):
            start = starts[document]
            source[start : start + common] = source[previous : previous + common]
            rows.append(np.arange(start + common, starts[document + 1]))
            previous = start
    counts = dict[int, int]()
    suffixes: list[tuple[int, int, int, int]] = []  # length of the prefix, own length, index of the prefix, document
    for group in groups:
        prefix, first = group.prefix, starts[group.documents[0]]
        index = counts.get(prefix, 0)
        counts[prefix] = index + 1
        rows.append(np.arange(first, first + prefix))
        for document in group.documents:
            source[starts[document] : starts[document] + prefix] = source[first : first + prefix]
            if lengths[document] > prefix:
                suffixes.append((prefix, lengths[document] - prefix, index, document))
    suffixes.sort()
    rows += [np.arange(starts[document] + prefix, starts[document + 1]) for prefix, _, _, document in suffixes]
    computed = np.concatenate(rows)
    if len(source) - len(computed) < MIN_SAVED_FRACTION * len(source):
        return None
    position = np.empty_like(source)
    position[computed] = np.arange(len(computed))

    paths = [tree_paths([lengths[document] for document in group.documents], group.common) for group in trees]
    by_shape = groupby(suffixes, key=lambda suffix: suffix[:2])
    return SharedPrefixes(
        torch.from_numpy(computed),
        torch.from_numpy(position[source]),
        tuple(Trees.from_paths(batch) for batch in group_by_size(paths)),
        tuple((prefix, count) for prefix, count in counts.items() if prefix),
        tuple((*shape, torch.tensor([index for _, _, index, _ in batch])) for shape, batch in by_shape),
    )


def _group_documents(tokens: np.ndarray, lengths: Sequence[int], starts: np.ndarray) -> list[_Group]:
    """Returns the documents in groups with common prefixes.

    Sorting puts documents with common prefixes next to each other; a group grows as long as that saves more tokens.
    """
    documents = [tokens[starts[i] : starts[i + 1]] for i in range(len(lengths))]
    order = sorted(range(len(lengths)), key=lambda i: documents[i].tobytes())
    groups = [_Group(0, order[:1], [0])]
    for previous, document in pairwise(order):
        group = groups[-1]
        common = _common_length(documents[previous], documents[document])
        prefix = common if len(group.documents) == 1 else min(group.prefix, common)
        if prefix * len(group.documents) > group.prefix * (len(group.documents) - 1):
            group.prefix = prefix
            group.documents.append(document)
            group.common.append(common)
        else:
            groups.append(_Group(0, [document], [0]))
    return groups


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


@torch.compiler.disable
def prefix_attention(q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, spec: AttentionSpec) -> Tensor:
    """Returns causal attention of the computed tokens [U, H, D], for q [U, H, D], k and v [U, G, D]."""
    sizes = [trees.gather_index.numel() for trees in shared.trees]
    sizes += [length * count for length, count in shared.prefixes]
    sizes += [own * len(indices) for _, own, indices in shared.suffixes]
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    outs: list[Tensor] = []
    prefix_kv: dict[int, tuple[Tensor, Tensor]] = {}
    for trees, (qs, ks, vs) in zip(shared.trees, parts, strict=False):
        outs.append(tree_attention(qs, ks, vs, trees, spec))
    for (length, count), part in zip(shared.prefixes, parts, strict=False):
        qs, ks, vs = (x.unflatten(0, (count, length)) for x in part)
        prefix_kv[length] = ks, vs
        outs.append(batched_attention(qs, ks, vs, spec).flatten(0, 1))
    for (prefix, own, indices), part in zip(shared.suffixes, parts, strict=True):
        qs, ks, vs = (x.unflatten(0, (len(indices), own)) for x in part)
        if prefix:
            prefix_keys, prefix_values = (x.index_select(0, indices) for x in prefix_kv[prefix])
            ks, vs = torch.cat((prefix_keys, ks), dim=1), torch.cat((prefix_values, vs), dim=1)
        outs.append(batched_attention(qs, ks, vs, spec).flatten(0, 1))
    return torch.cat(outs)
