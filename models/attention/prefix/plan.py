"""Shared prefixes: tokens at the start of several documents are computed once.

The answers to one prompt, an agent's turns that each repeat its history, or examples after one system prompt share a
prefix. Under causal attention equal prefixes have equal hidden states, so the layers need one copy of each run of
tokens between two branches (for RL, with one branch: Prefix Grouper, Liu et al. 2025, arXiv:2506.05433). A recurrent
mixer starts each branch with the state after its parent run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.packed.blockwise import batched_attention
from archon.models.attention.packed.documents import PackedDocuments, check_lengths, cu_seqlens_from_lengths
from archon.models.attention.prefix.cascade import Cascade
from archon.models.attention.prefix.search import NODE_TOKENS, PrefixForest, PrefixNode
from archon.models.attention.prefix.tree import Trees, group_by_size, tree_attention, tree_paths
from archon.models.attention.spans import bounds, ranges
from archon.models.attention.spec import AttentionSpec
from archon.parallel.transfer import to_device_async

MIN_SAVED_FRACTION = 0.1
"""Minimum fraction of a pack's tokens that sharing must save."""


@dataclass(frozen=True)
class Runs:
    """N runs of `length` tokens, each after a context of `before` tokens.

    Attributes:
        contexts: the distinct contexts, as run numbers; empty for runs without context.
        index: int64 [N], the context of each run.
    """

    length: int
    before: int
    contexts: tuple[tuple[int, ...], ...]
    index: Tensor

    @property
    def tokens(self) -> int:
        """Tokens of all N runs."""
        return self.length * len(self.index)


@dataclass(frozen=True)
class Level:
    """Computed tokens with the same number of branches before them, for recurrent mixers.

    Attributes:
        rows: int64 [n], positions among the computed tokens.
        documents: the B runs that they form.
        before: int64 [B], the parent run of each in the previous level; None on the first level.
    """

    rows: Tensor
    documents: PackedDocuments
    before: Tensor | None


@dataclass(frozen=True)
class SharedPrefixes:
    """The U computed tokens of a pack's T tokens, and the hidden state of each token.

    The computed tokens are the tokens of trees, then the runs of all other documents, sorted by context length and run
    length.

    Attributes:
        rows: int64 [U], the computed tokens as indices into the pack.
        gather_index: int64 [T], the index of each token's hidden state among the computed ones.
        trees: groups of short documents with shared prefixes, which branch at every difference.
        runs: runs of tokens of all other documents, numbered in this order.
        parents: (first computed token, length, number of the parent run or -1) of every run, runs in trees first, for
            recurrent mixers and kernels of packed documents; a run comes after its parent.
    """

    rows: Tensor
    gather_index: Tensor
    trees: tuple[Trees, ...]
    runs: tuple[Runs, ...]
    parents: tuple[tuple[int, int, int], ...]

    def to(self, device: torch.device) -> SharedPrefixes:
        """Return a copy with its indices on `device`."""
        runs = tuple(replace(batch, index=to_device_async(batch.index, device)) for batch in self.runs)
        trees = tuple(tree.to(device) for tree in self.trees)
        rows, gather_index = (to_device_async(x, device) for x in (self.rows, self.gather_index))
        return replace(self, rows=rows, gather_index=gather_index, trees=trees, runs=runs)

    def padded(self, padding: int) -> SharedPrefixes:
        """Append `padding` computed tokens, one more document that no token uses."""
        if not padding:
            return self
        first = sum(length for _, length, _ in self.parents)
        extra = Runs(padding, 0, ((),), torch.zeros(1, dtype=torch.int64, device=self.rows.device))
        return replace(self, runs=(*self.runs, extra), parents=(*self.parents, (first, padding, -1)))

    def counts(self) -> Tensor:
        """Return how many tokens of the pack use each computed one: int64 [U]."""
        return torch.zeros_like(self.rows).scatter_add_(0, self.gather_index, torch.ones_like(self.gather_index))

    @cached_property
    def cascade(self) -> Cascade:
        """Runs and their contexts, also those in trees, for kernels of packed documents."""
        return Cascade(self.parents, self.rows.device)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Computed tokens by the number of branches before them."""
        device, depth, place = self.rows.device, list[int](), list[int]()
        members: list[list[int]] = []
        for number, (_, _, parent) in enumerate(self.parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            if depth[number] == len(members):
                members.append([])
            place.append(len(members[depth[number]]))
            members[depth[number]].append(number)
        levels = list[Level]()
        for numbers in members:
            firsts, lengths, parents = zip(*(self.parents[number] for number in numbers), strict=True)
            rows = to_device_async(torch.from_numpy(ranges(firsts, lengths)), device)
            documents = PackedDocuments(cu_seqlens_from_lengths(lengths, device), max(lengths), lengths)
            before = torch.tensor([place[parent] for parent in parents]) if levels else None
            levels.append(Level(rows, documents, None if before is None else to_device_async(before, device)))
        return tuple(levels)

    @cached_property
    def level_order(self) -> Tensor:
        """int64 [U], the position of each computed token in the concatenated levels."""
        return torch.argsort(torch.cat([level.rows for level in self.levels]))


def shared_prefixes(tokens: Tensor, lengths: Sequence[int], *, every_token: bool = True) -> SharedPrefixes | None:
    """Return the shared prefixes of a pack's documents; None if they save less than they cost.

    Args:
        tokens: int64 [T] on the CPU.
        lengths: lengths of the documents, with sum T.
        every_token: also compute the last token of a document, which predicts nothing. Otherwise it gets the hidden
            state of the token before it, unless another document continues from it.
    """
    starts = bounds(lengths)
    token_ids = tokens.numpy()
    forest = PrefixForest([token_ids[starts[i] : starts[i + 1]] for i in range(len(lengths))], every_token)
    trees = sorted(forest.trees, key=lambda root: root.tokens)
    # 1. Order the computed tokens: trees, then runs. Sorting by `low` puts a run after its parent.
    runs = sorted((node for root in forest.roots for node in root.walk()), key=lambda node: (node.low, _length(node)))
    nodes = [node for root in trees for node in root.walk()] + runs
    computed = ranges([starts[node.document] + node.low for node in nodes], list(map(_length, nodes)))
    if not _is_worthwhile(sum(node.high for node in forest.end), len(computed), forest, lengths):
        return None
    # 2. Map every token of the pack to its computed token.
    firsts = bounds([*map(_length, nodes)])
    number = {id(node): index for index, node in enumerate(nodes)}
    used = [(document, node) for document, end in enumerate(forest.end) for node in end.path()]
    lengths_used = [_length(node) for _, node in used]
    source = np.full(len(token_ids), -1)
    source[ranges([starts[document] + node.low for document, node in used], lengths_used)] = ranges(
        [firsts[number[id(node)]] for _, node in used], lengths_used
    )
    (omitted,) = np.nonzero(source < 0)
    source[omitted] = source[omitted - 1]
    # 3. Batch trees by size, and runs by context and run length.
    paths = [tree_paths([node.high for node in root.walk()], [node.low for node in root.walk()]) for root in trees]
    run_number = {id(node): index for index, node in enumerate(runs)}
    return SharedPrefixes(
        torch.from_numpy(computed),
        torch.from_numpy(source),
        tuple(Trees.from_paths(batch) for batch in group_by_size(paths)),
        tuple(_runs(list(batch), run_number) for _, batch in groupby(runs, key=lambda node: (node.low, _length(node)))),
        tuple(
            (int(first), _length(node), -1 if node.parent is None else number[id(node.parent)])
            for first, node in zip(firsts, nodes, strict=False)
        ),
    )


def _length(node: PrefixNode) -> int:
    return node.high - node.low


def _is_worthwhile(tokens: int, computed: int, forest: PrefixForest, lengths: Sequence[int]) -> bool:
    """Return whether computing `computed` of `tokens` tokens takes less time.

    Without sharing the documents of one length are one attention call; with sharing the runs of one length are.
    """
    saved = tokens - computed
    further = max(0, forest.nodes - len({*lengths}))
    return saved >= MIN_SAVED_FRACTION * tokens and saved >= NODE_TOKENS * further


def _runs(batch: Sequence[PrefixNode], number: dict[int, int]) -> Runs:
    contexts = [tuple(number[id(node)] for node in run.path()[:-1]) for run in batch]
    distinct = {context: index for index, context in enumerate(dict.fromkeys(contexts))}
    index = torch.tensor([distinct[context] for context in contexts])
    return Runs(_length(batch[0]), batch[0].low, tuple(distinct), index)


@torch.compiler.disable
def prefix_attention(q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, spec: AttentionSpec) -> Tensor:
    """Return causal attention of the computed tokens [U, H, D], for q [U, H, D], k and v [U, G, D]."""
    sizes = [trees.tokens for trees in shared.trees] + [batch.tokens for batch in shared.runs]
    check_lengths(sum(sizes), len(q))
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    spec = spec.with_wide_sinks(q.dtype)
    outs: list[Tensor] = []
    for trees, (qs, ks, vs) in zip(shared.trees, parts, strict=False):
        outs.append(tree_attention(qs, ks, vs, trees, spec))
    keys, values = list[Tensor](), list[Tensor]()  # of each run
    for batch, part in zip(shared.runs, parts, strict=True):
        qs, ks, vs = (x.unflatten(0, (len(batch.index), batch.length)) for x in part)
        keys += ks.unbind()
        values += vs.unbind()
        if batch.before:
            ks, vs = (torch.cat((_context(batch, prior, spec.window), x), 1) for prior, x in ((keys, ks), (values, vs)))
        outs.append(batched_attention(qs, ks, vs, spec).flatten(0, 1))
    return torch.cat(outs)


def _context(batch: Runs, of_runs: Sequence[Tensor], window: int | None) -> Tensor:
    """Return the keys or values [N, n, G, D] before each run, as far as a window reaches."""
    last = batch.before if window is None else min(batch.before, window - 1)
    contexts = [torch.cat([of_runs[run] for run in context])[batch.before - last :] for context in batch.contexts]
    stacked = torch.stack(contexts)
    return stacked if len(contexts) == len(batch.index) else stacked.index_select(0, batch.index)
