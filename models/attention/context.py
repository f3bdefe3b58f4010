"""Attention over a pack whose tokens several ranks hold: by swapping tokens for heads, or by gathering keys."""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.attention.documents import GatheredKeys
from archon.models.attention.meta import AttentionMeta, PackedAttention
from archon.models.attention.registry import resolve_backend
from archon.models.attention.spec import AttentionSpec
from archon.parallel.comm import Group, all_gather, all_to_all
from archon.parallel.context import SequenceShare, ulysses_repeat


class ContextParallelAttention(AttentionMeta):
    """What both ways have in common: the documents of the whole pack, this rank's share of their tokens."""

    def __init__(self, share: SequenceShare, attn_type: str) -> None:
        self.share, self.attn_type, self.valid_mask = share, attn_type, share.valid_mask

    def document_lengths(self, positions: Tensor) -> Tensor:
        lengths = torch.tensor(self.share.plan.lengths)
        per_token = torch.repeat_interleave(lengths, lengths).to(positions.device)
        return per_token.index_select(0, self.share.index)


class UlyssesAttention(ContextParallelAttention):
    """Each rank attends over the whole pack with its share of the heads (Jacobs et al. 2023, arXiv:2309.14509).

    Key heads fewer than ranks are repeated. The share must be a contiguous one.
    """

    def __init__(self, share: SequenceShare, attn_type: str) -> None:
        super().__init__(share, attn_type)
        self.whole = PackedAttention.of_lengths(share.plan.lengths, share.index.device, attn_type)

    def begin(self, hidden: Tensor) -> None:
        self.whole.begin(hidden)

    @torch.compiler.disable
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        spec.require({"window", "soft_cap"}, "Ulysses, which gives each rank some of the heads,")
        group = self.share.cp
        heads, key_heads = q.shape[1], k.shape[1]
        repeat = ulysses_repeat(heads, key_heads, group.size)
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        q, k, v = (_tokens_to_heads(x, group) for x in (q, k, v))
        return _heads_to_tokens(self.whole.attend(layer, q, k, v, spec), group)


def _tokens_to_heads(x: Tensor, group: Group) -> Tensor:
    """[T / cp, H, D] of own tokens to [T, H / cp, D] of own heads."""
    by_rank = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    return all_to_all(by_rank.flatten(0, 1), group)


def _heads_to_tokens(x: Tensor, group: Group) -> Tensor:
    by_rank = all_to_all(x.contiguous(), group).unflatten(0, (group.size, -1))
    return by_rank.transpose(0, 1).flatten(1, 2)


class GatheredAttention(ContextParallelAttention):
    """Each rank gathers all keys and values and attends with its own queries: any number of ranks, whatever the heads.

    A rank's tokens are chunks of documents; a chunk's queries meet the keys of its document up to its end.
    """

    def begin(self, hidden: Tensor) -> None:
        self.backend = resolve_backend(self.attn_type, hidden.device, hidden.dtype)
        assert self.backend.attends_gathered, "the layout's check refuses it"
        self.keys = GatheredKeys(self.share)
        self.backend.prepare_gathered(self.keys)

    @torch.compiler.disable
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.backend.require(spec)
        return self.backend.gathered(q, all_gather(torch.cat((k, v), dim=1), self.share.cp), self.keys, spec)
