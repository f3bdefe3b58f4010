"""Shard the tokens of a packed batch for context and sequence parallelism, and gather per-token results.

Two ways to shard a packed batch over `cp` ranks; both may cut a document anywhere:

- contiguous: rank r holds the r-th part of the tokens. Used by Ulysses (Jacobs et al. 2023, arXiv:2309.14509), which
  exchanges tokens for heads around attention, so every split is balanced.
- zigzag: each document is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r. Every rank then has an
  equal part of the causal triangle of every document (Llama 3: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2).

A padding document at the end gives all ranks the same number of tokens, a multiple of `tp`. With per-tensor FP8
scaling, one-token documents that repeat the first token pad instead, so padding cannot change the maximum of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from archon.parallel.comm import Group, all_gather_replicated
from archon.parallel.transfer import to_device_async
from archon.schema.errors import LayoutError

Chunk = tuple[int, int, int]
"""(document, start, stop): tokens start .. stop of a document on one rank."""


@dataclass(frozen=True)
class ContextPlan:
    """Assignment of document chunks to ranks.

    Attributes:
        lengths: document lengths, including a last document of `padding` tokens if padding > 0.
        padding: number of padding tokens.
        chunks: the chunks of each rank in order.
        repeats_first: padding is `padding` documents of one token instead of one document.
    """

    lengths: tuple[int, ...]
    padding: int
    chunks: tuple[tuple[Chunk, ...], ...]
    repeats_first: bool = False

    def repeating_first(self) -> ContextPlan:
        """Return the plan with one padding document per padding token."""
        if not self.padding:
            return self
        last, chunks = len(self.lengths) - 1, []
        for rank_chunks in self.chunks:
            documents = [chunk for chunk in rank_chunks if chunk[0] != last]
            padding = [range(start, stop) for document, start, stop in rank_chunks if document == last]
            chunks.append((*documents, *((last + token, 0, 1) for tokens in padding for token in tokens)))
        lengths = self.lengths[:-1] + (1,) * self.padding
        return replace(self, lengths=lengths, chunks=tuple(chunks), repeats_first=True)


def contiguous_plan(lengths: tuple[int, ...], cp: int, divisor: int, min_tokens: int = 0) -> ContextPlan:
    """Assign equal parts in order, each a multiple of `divisor` tokens and at least `min_tokens`."""
    tokens = sum(lengths)
    rows = max(_ceil(tokens, cp * divisor) * divisor, min_tokens)
    padding = rows * cp - tokens
    lengths = (*lengths, padding) if padding else lengths
    chunks: list[list[Chunk]] = [[] for _ in range(cp)]
    first = 0
    for document, length in enumerate(lengths):
        for rank in range(first // rows, _ceil(first + length, rows)):
            start, stop = max(rank * rows - first, 0), min((rank + 1) * rows - first, length)
            if start < stop:
                chunks[rank].append((document, start, stop))
        first += length
    return ContextPlan(lengths, padding, tuple(map(tuple, chunks)))


def zigzag_plan(lengths: tuple[int, ...], cp: int, divisor: int, min_tokens: int = 0) -> ContextPlan:
    """Assign two mirrored chunks of every document to each rank."""
    chunks: list[list[Chunk]] = [[] for _ in range(cp)]
    for document, length in enumerate(lengths):
        bounds = [length * part // (2 * cp) for part in range(2 * cp + 1)]
        for rank in range(cp):
            for part in (rank, 2 * cp - 1 - rank):
                start, stop = bounds[part], bounds[part + 1]
                if start == stop:
                    continue
                if chunks[rank] and chunks[rank][-1][0] == document and chunks[rank][-1][2] == start:
                    start = chunks[rank].pop()[1]
                chunks[rank].append((document, start, stop))
    totals = [sum(stop - start for _, start, stop in rank_chunks) for rank_chunks in chunks]
    rows = max(_ceil(max(totals), divisor) * divisor, min_tokens)
    padding = 0
    for rank_chunks, total in zip(chunks, totals, strict=True):
        if total < rows:
            rank_chunks.append((len(lengths), padding, padding + rows - total))
            padding += rows - total
    return ContextPlan((*lengths, padding) if padding else lengths, padding, tuple(map(tuple, chunks)))


def ulysses_repeat(heads: int, kv_heads: int, cp: int) -> int:
    """Return how often each key head is repeated so that `cp` divides the key heads.

    Raises:
        LayoutError: `cp` does not divide the heads.
    """
    if heads % cp == 0:
        for repeat in range(1, heads // kv_heads + 1):
            if kv_heads * repeat % cp == 0 and heads % (kv_heads * repeat) == 0:
                return repeat
    raise LayoutError(
        f"Ulysses splits heads over ranks, and cp = {cp} does not divide the {heads} heads of a rank; "
        "use context_parallel = allgather, which has no such limit"
    )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


class TokenShard:
    """Context-parallel shard of a packed batch, padded so that every rank has the same number of tokens.

    Args:
        order: int64 on the CPU, token indices of rank 0, then rank 1, and so on; indices >= `tokens` are padding.
        tokens: number of tokens in the packed batch.
        cp: the context-parallel group.
        device: device of the index tensors.

    Attributes:
        index: int64 [T / cp], token indices of this rank.
        inverse: position of each token in `order`.
    """

    def __init__(self, order: Tensor, tokens: int, cp: Group, device: torch.device) -> None:
        self.cp, self.tokens, self.padding = cp, tokens, order.shape[0] - tokens
        rows = order.shape[0] // cp.size
        self._local_order = order[cp.rank * rows : (cp.rank + 1) * rows]
        self.index = to_device_async(self._local_order, device)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0]))
        self.inverse = to_device_async(inverse, device)

    @classmethod
    def by_owner(cls, owner: Tensor, cp: Group, device: torch.device) -> TokenShard:
        """Shard tokens by `owner`, the rank of each token: int64 [T] on the CPU."""
        tokens = owner.shape[0]
        rank_indices = [(owner == rank).nonzero().squeeze(1) for rank in range(cp.size)]
        most, padding, parts = max(map(len, rank_indices)), tokens, list[Tensor]()
        for indices in rank_indices:
            missing = most - len(indices)
            parts += [indices, torch.arange(padding, padding + missing)]
            padding += missing
        return cls(torch.cat(parts), tokens, cp, device)

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """Return the local rows [T / cp, ...] of a per-token tensor [T, ...], with `fill` at padding."""
        if self.padding:
            x = torch.cat((x, x.new_full((self.padding, *x.shape[1:]), fill)))
        return x.index_select(0, self.index)

    def take_cpu(self, x: Tensor, fill: int) -> Tensor:
        """Return `take` of a CPU tensor [T], on the CPU."""
        return torch.cat((x, x.new_full((self.padding,), fill))).index_select(0, self._local_order)

    def rows(self, rows: Tensor) -> Tensor:
        """Return the local indices of the tokens `rows` of the packed batch; int64, both on the CPU."""
        selected = torch.zeros(self.tokens + self.padding, dtype=torch.bool)
        selected[rows] = True
        return selected[self._local_order].nonzero().squeeze(1)

    def gather(self, x: Tensor) -> Tensor:
        """Gather per-token results [T / cp, ...] to [T, ...] on every rank, without padding.

        Differentiable, for a loss that every rank computes.
        """
        return all_gather_replicated(x, self.cp).index_select(0, self.inverse[: self.tokens])


class SequenceShard(TokenShard):
    """Token shard of a context plan, with the sequence-parallel shard of the tokens between layers.

    Args:
        plan: the chunks of each rank of `cp`.
        cp, tp: groups that shard tokens; size 1 if they do not.
        device: device of the index tensors.

    Attributes:
        valid_mask: bool [T / cp / tp], False for padding, for the tokens of this rank between layers; None without
            padding.
    """

    def __init__(self, plan: ContextPlan, cp: Group, tp: Group, device: torch.device) -> None:
        self.plan, self.tp = plan, tp
        starts = torch.tensor([0, *plan.lengths]).cumsum(0).tolist()
        chunks = [chunk for rank_chunks in plan.chunks for chunk in rank_chunks]
        order = torch.cat([torch.arange(starts[i] + start, starts[i] + stop) for i, start, stop in chunks])
        super().__init__(order, starts[-1] - plan.padding, cp, device)
        rows = self._local_order.shape[0] // tp.size
        self._layer_slice = slice(tp.rank * rows, (tp.rank + 1) * rows)
        self._layer_tokens = self._local_order[self._layer_slice]
        self.valid_mask = to_device_async(self._layer_tokens < self.tokens, device) if plan.padding else None

    def take_inputs(self, x: Tensor, fill: float = 0) -> Tensor:
        """Return `take` of a model input; with `repeats_first`, padding repeats the input of the first token."""
        if not self.plan.repeats_first:
            return self.take(x, fill)
        return torch.cat((x, x[:1].expand(self.padding, *x.shape[1:]))).index_select(0, self.index)

    def take_layer_inputs(self, x: Tensor, fill: float = 0) -> Tensor:
        """Return `take_inputs` for the tokens of this rank between layers: [T / cp / tp, ...]."""
        return self.take_inputs(x, fill)[self._layer_slice]

    def local_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Find which of `rows` [M] this rank holds between layers.

        Returns:
            The local indices of these tokens and their indices in `rows`; int64, all on the CPU.
        """
        number = torch.full((self.tokens + self.plan.padding,), -1)
        number[rows] = torch.arange(len(rows))
        local_number = number[self._layer_tokens]
        places = (local_number >= 0).nonzero().squeeze(1)
        return places, local_number[places]

    def positions(self, positions: Tensor) -> Tensor:
        """Return `take` of positions [T] or [3, T]; padding counts from 0 like another document."""
        if positions.dim() == 2:
            return torch.stack([self.positions(axis) for axis in positions])
        if self.plan.padding:
            extra = torch.arange(self.plan.padding, dtype=positions.dtype, device=positions.device)
            if self.plan.repeats_first:
                extra = torch.zeros_like(extra)
            positions = torch.cat((positions, extra))
        return positions.index_select(0, self.index)
