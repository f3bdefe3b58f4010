"""How the tokens of a micro-batch are split over the ranks that share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from archon.models.attention.context import ContextParallelAttention, GatheredAttention, UlyssesAttention
from archon.models.attention.meta import PackedAttention
from archon.parallel.context import ContextPlan, SequenceShare, contiguous_plan, zigzag_plan
from archon.parallel.ranks import Ranks
from archon.schema.config import ContextParallelKind


@dataclass(frozen=True)
class TokenSplit:
    """How a micro-batch's tokens are dealt out to the ranks that share it."""

    ranks: Ranks
    kind: ContextParallelKind
    attn_type: str

    def share(self, lengths: tuple[int, ...], device: torch.device, least: int = 0) -> SequenceShare:
        """This rank's tokens of a pack of documents of `lengths`; at least `least` a rank."""
        return SequenceShare(self._plan(lengths, least), self.ranks.cp, self.ranks.tp, device)

    def rows(self, lengths: tuple[int, ...]) -> int:
        """The tokens a context-parallel rank holds of a pack, padding included."""
        return sum(stop - start for _, start, stop in self._plan(lengths, 0).chunks[0])

    def _plan(self, lengths: tuple[int, ...], least: int) -> ContextPlan:
        plan = zigzag_plan if self.ranks.cp.size > 1 and self.kind == "allgather" else contiguous_plan
        return plan(lengths, self.ranks.cp.size, self.ranks.tp.size, least)

    def attention(self, share: SequenceShare) -> ContextParallelAttention | PackedAttention:
        """How the tokens of this rank's share attend."""
        if self.ranks.cp.size > 1:
            attention = GatheredAttention if self.kind == "allgather" else UlyssesAttention
            return attention(share, self.attn_type)
        packed = PackedAttention.from_lengths(share.plan.lengths, share.index.device, self.attn_type)
        packed.valid_mask = share.valid_mask
        return packed
