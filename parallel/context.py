"""Splits the tokens of a pack over ranks for context and sequence parallelism, and gathers per-token results.

Two splits of a pack over `cp` ranks; both may cut a document anywhere:

- contiguous: rank r holds the r-th part of the tokens. For Ulysses (Jacobs et al. 2023, arXiv:2309.14509), which
  exchanges tokens for heads around attention, so that every split is balanced.
- zigzag: each document is cut into 2 cp chunks and rank r holds chunks r and 2 cp - 1 - r, so that every rank has the
  same share of the causal triangle of every document (as in Llama 3: Dubey et al. 2024, arXiv:2407.21783, section
  3.3.2, for sequences).

Ranks get equally many tokens, a multiple of `tp`, by a padding document at the end; or, where the largest value of a
tensor counts, by documents of one token that repeat the pack's first one, whose values are then those of that token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from archon.parallel.comm import Group, all_gather_replicated
from archon.parallel.transfer import to_device_async
from archon.schema.errors import LayoutError

Chunk = tuple[int, int, int]
"""(document, start, stop): a rank's tokens start .. stop of a document."""


@dataclass(frozen=True)
class ContextPlan:
    """Documents of `lengths`, the last one of `padding` tokens if that is not 0, and each rank's chunks in order.

    With `repeats_first` the last `padding` ones have a token each.
    """

    lengths: tuple[int, ...]
    padding: int
    chunks: tuple[tuple[Chunk, ...], ...]
    repeats_first: bool = False

    def repeating_first(self) -> ContextPlan:
        """Returns the plan with a document for each token of the padding."""
        if not self.padding:
            return self
        last = len(self.lengths) - 1
        chunks = tuple(
            tuple(
                part
                for document, start, stop in own
                for part in (
                    [(document, start, stop)]
                    if document != last
                    else [(last + token, 0, 1) for token in range(start, stop)]
                )
            )
            for own in self.chunks
        )
        return replace(self, lengths=self.lengths[:-1] + (1,) * self.padding, chunks=chunks, repeats_first=True)


def contiguous_plan(lengths: tuple[int, ...], cp: int, divisor: int, min_tokens: int = 0) -> ContextPlan:
    """Returns equal parts in order; each a multiple of `divisor` tokens and at least `min_tokens`."""
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
    """Returns two mirrored chunks of every document a rank; as many tokens a rank as `contiguous_plan` allows."""
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
    totals = [sum(stop - start for _, start, stop in own) for own in chunks]
    rows = max(_ceil(max(totals), divisor) * divisor, min_tokens)
    padding = 0
    for own, total in zip(chunks, totals, strict=True):
        if total < rows:
            own.append((len(lengths), padding, padding + rows - total))
            padding += rows - total
    return ContextPlan((*lengths, padding) if padding else lengths, padding, tuple(map(tuple, chunks)))


def ulysses_repeat(heads: int, kv_heads: int, cp: int) -> int:
    """Returns how often each key head is repeated so that `cp` divides the key heads. Raises LayoutError where `cp`
    does not divide the heads."""
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
    """Tokens of a pack, each dealt to one rank of a group, and padding, so that every rank has as many.

    Args:
        order: int64 on the CPU, the tokens of each rank in turn as indices into the pack; those from `tokens` on are
            padding.
        tokens: the number of the pack's tokens.
        cp: the ranks.

    `index` has this rank's own, `inverse` the place of each token in `order`.
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
        """Returns the tokens of a pack dealt to the ranks that `owner`, int64 [T] on the CPU, names."""
        tokens = owner.shape[0]
        of_ranks = [(owner == rank).nonzero().squeeze(1) for rank in range(cp.size)]
        most, padding, parts = max(map(len, of_ranks)), tokens, list[Tensor]()
        for own in of_ranks:
            missing = most - len(own)
            parts += [own, torch.arange(padding, padding + missing)]
            padding += missing
        return cls(torch.cat(parts), tokens, cp, device)

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """Returns the own rows of a per-token tensor [T, ...], `fill` at padding: [T / cp, ...]."""
        if self.padding:
            x = torch.cat((x, x.new_full((self.padding, *x.shape[1:]), fill)))
        return x.index_select(0, self.index)

    def take_cpu(self, x: Tensor, fill: int) -> Tensor:
        """Same as `take`, of a tensor [T] on the CPU and to it."""
        return torch.cat((x, x.new_full((self.padding,), fill))).index_select(0, self._local_order)

    def rows(self, rows: Tensor) -> Tensor:
        """Returns the indices among the own tokens of those that `rows` indexes in the pack; int64, both on the CPU."""
        selected = torch.zeros(self.tokens + self.padding, dtype=torch.bool)
        selected[rows] = True
        return selected[self._local_order].nonzero().squeeze(1)

    def gather(self, x: Tensor) -> Tensor:
        """Gathers per-token results [T / cp, ...] to those of the pack [T, ...] on every rank, without padding; with
        gradient, for a loss that every rank computes."""
        return all_gather_replicated(x, self.cp).index_select(0, self.inverse[: self.tokens])


class SequenceShard(TokenShard):
    """This rank's tokens of one pack.

    Args:
        plan: the tokens of each rank of `cp`.
        cp, tp: the groups that split tokens, of size 1 where they do not.

    `index` [T / cp] is the position of each own token in the padded pack; `valid_mask` [T / cp / tp] is False for
    padding, among the tokens that this rank holds between layers.
    """

    def __init__(self, plan: ContextPlan, cp: Group, tp: Group, device: torch.device) -> None:
        self.plan, self.tp = plan, tp
        starts = torch.tensor([0, *plan.lengths]).cumsum(0).tolist()
        chunks = [chunk for own in plan.chunks for chunk in own]
        order = torch.cat([torch.arange(starts[i] + start, starts[i] + stop) for i, start, stop in chunks])
        super().__init__(order, starts[-1] - plan.padding, cp, device)
        rows_per_rank = self._local_order.shape[0] // tp.size
        self._layer_tokens = self._local_order[tp.rank * rows_per_rank :][:rows_per_rank]
        self._layer_slice = slice(tp.rank * rows_per_rank, (tp.rank + 1) * rows_per_rank)
        valid_mask = self._local_order[tp.rank * rows_per_rank : (tp.rank + 1) * rows_per_rank] < self.tokens
        self.valid_mask = to_device_async(valid_mask, device) if plan.padding else None

    def take_inputs(self, x: Tensor, fill: float = 0) -> Tensor:
        """Same as `take`, of what a token's values are computed from; padding that repeats the first has its."""
        if not self.plan.repeats_first:
            return self.take(x, fill)
        return torch.cat((x, x[:1].expand(self.padding, *x.shape[1:]))).index_select(0, self.index)

    def take_layer_inputs(self, x: Tensor, fill: float = 0) -> Tensor:
        """Same as `take_inputs`, of the tokens that this rank holds between layers: [T / cp / tp, ...]."""
        return self.take_inputs(x, fill)[self._layer_slice]

    def local_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices, among the tokens that this rank holds between layers, of those that `rows` [M] indexes
        in the pack, and which of `rows` these are; int64, all on the CPU."""
        number = torch.full((self.tokens + self.plan.padding,), -1)
        number[rows] = torch.arange(len(rows))
        found = number[self._layer_tokens]
        places = (found >= 0).nonzero().squeeze(1)
        return places, found[places]

    def positions(self, positions: Tensor) -> Tensor:
        """Same as `take`, of positions [T] or [3, T], with padding as one more document."""
        if positions.dim() == 2:
            return torch.stack([self.positions(axis) for axis in positions])
        if self.plan.padding:
            extra = torch.arange(self.plan.padding, dtype=positions.dtype, device=positions.device)
            if self.plan.repeats_first:
                extra = torch.zeros_like(extra)
            positions = torch.cat((positions, extra))
        return positions.index_select(0, self.index)
