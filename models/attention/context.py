"""Attention over a pack whose tokens several ranks hold: by swapping tokens for heads, or by gathering keys."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from archon.models.attention.backend import AttnType, resolve_backend
from archon.models.attention.blockwise import blockwise_attention
from archon.models.attention.meta import AttentionMeta, PackedAttention
from archon.models.attention.varlen import varlen_attention
from archon.parallel.comm import Group, all_gather, all_to_all
from archon.parallel.context import SequenceShare, ulysses_repeat


class SharedAttention(AttentionMeta):
    """What both ways have in common: the documents of the whole pack, this rank's share of their tokens."""

    def __init__(self, share: SequenceShare, attn_type: AttnType) -> None:
        self.share, self.attn_type, self.counted = share, attn_type, share.counted
        self.lengths = share.plan.lengths

    def document_lengths(self, positions: Tensor) -> Tensor:
        lengths = torch.tensor(self.lengths)
        per_token = torch.repeat_interleave(lengths, lengths).to(positions.device)
        return per_token.index_select(0, self.share.index)


class UlyssesAttention(SharedAttention):
    """Each rank attends over the whole pack with its share of the heads (Jacobs et al. 2023, arXiv:2309.14509).

    Key heads fewer than ranks are repeated. The share must be a contiguous one.
    """

    def __init__(self, share: SequenceShare, attn_type: AttnType) -> None:
        super().__init__(share, attn_type)
        bounds = torch.tensor([0, *self.lengths]).cumsum(0).to(share.index.device, torch.int32)
        self.inner = PackedAttention(bounds, max(self.lengths), attn_type, self.lengths)

    def begin(self, hidden: Tensor) -> None:
        self.inner.begin(hidden)

    @torch.compiler.disable
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
        group = self.share.cp
        heads, key_heads = q.shape[1], k.shape[1]
        repeat = ulysses_repeat(heads, key_heads, group.size)
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        q, k, v = (_tokens_to_heads(x, group) for x in (q, k, v))
        out = self.inner.attend(layer, q, k, v, window=window, scale=scale)
        return _heads_to_tokens(out, group)


def _tokens_to_heads(x: Tensor, group: Group) -> Tensor:
    """[T / cp, H, D] of own tokens to [T, H / cp, D] of own heads."""
    by_rank = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    return all_to_all(by_rank.flatten(0, 1), group)


def _heads_to_tokens(x: Tensor, group: Group) -> Tensor:
    by_rank = all_to_all(x.contiguous(), group).unflatten(0, (group.size, -1))
    return by_rank.transpose(0, 1).flatten(1, 2)


class GatheredAttention(SharedAttention):
    """Each rank gathers all keys and values and attends with its own queries: any number of ranks, whatever the heads.

    A rank's tokens are chunks of documents; a chunk's queries meet the keys of its document up to its end.
    """

    def begin(self, hidden: Tensor) -> None:
        self.backend = resolve_backend(self.attn_type, hidden.device, hidden.dtype)
        assert self.backend != "flash", "the layout's check refuses it"
        lengths, own = self.lengths, self.share.plan.chunks[self.share.cp.rank]
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self.queries = [stop - start for _, start, stop in own]
        self.keys = [(starts[document], stop) for document, _, stop in own]
        if self.backend == "varlen":
            device = hidden.device
            spans = [torch.arange(first, first + stop) for first, stop in self.keys]
            self.key_index = self.share.inverse.index_select(0, torch.cat(spans).to(device))
            self.cu_q = torch.tensor([0, *self.queries]).cumsum(0).to(device, torch.int32)
            self.cu_k = torch.tensor([0, *(stop for _, stop in self.keys)]).cumsum(0).to(device, torch.int32)

    @torch.compiler.disable
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
        key_heads = k.shape[1]
        kv = all_gather(torch.cat((k, v), dim=1), self.share.cp)
        if self.backend == "varlen":
            k, v = kv.index_select(0, self.key_index).split(key_heads, dim=1)
            longest = (max(self.queries), max(stop for _, stop in self.keys))
            return varlen_attention(
                q, k, v, self.cu_q, longest[0], window=window, scale=scale, cu_seqlens_k=self.cu_k, max_k=longest[1]
            )
        k, v = kv.index_select(0, self.share.inverse).split(key_heads, dim=1)
        return self._by_chunks(q, k, v, window, scale)

    def _by_chunks(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
        """Neighbouring chunks of one shape at a time."""
        outs, row = [], 0
        shapes = zip(self.queries, self.keys, strict=True)
        for (length, stop), same in groupby(shapes, key=lambda shape: (shape[0], shape[1][1])):
            firsts = [first for _, (first, _) in same]
            rows = q[row : row + length * len(firsts)].unflatten(0, (len(firsts), length))
            keys, values = (torch.stack([x[first : first + stop] for first in firsts]) for x in (k, v))
            outs.append(blockwise_attention(rows, keys, values, window=window, scale=scale).flatten(0, 1))
            row += length * len(firsts)
        return torch.cat(outs)
