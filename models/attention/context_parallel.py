"""Attention under context parallelism: each rank holds some of a pack's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from archon.models.attention.documents import GatheredKeys
from archon.models.attention.latent import LatentKeys
from archon.models.attention.meta import AttentionMeta, PackedAttention, Scan
from archon.models.attention.registry import resolve_backend
from archon.models.attention.spec import AttentionSpec
from archon.parallel.comm import Group, all_gather, all_to_all
from archon.parallel.context import SequenceShare, ulysses_repeat


class ContextParallelAttention(AttentionMeta):
    """Base class: `share` has the documents of the full pack, and which of their tokens this rank holds."""

    def __init__(self, share: SequenceShare, attn_type: str) -> None:
        self.share, self.attn_type, self.valid_mask = share, attn_type, share.valid_mask

    def document_lengths(self, positions: Tensor) -> Tensor:
        lengths = torch.tensor(self.share.plan.lengths)
        return self.share.take_on_cpu(lengths.repeat_interleave(lengths), 0)


class UlyssesAttention(ContextParallelAttention):
    """Each rank attends over the full pack with some of the heads (Jacobs et al. 2023, arXiv:2309.14509).

    If there are fewer key heads than ranks, they are repeated. `share` must be contiguous; `packed` is the attention
    over the full pack, by default within its documents.
    """

    def __init__(self, share: SequenceShare, attn_type: str, packed: AttentionMeta | None = None) -> None:
        super().__init__(share, attn_type)
        self.packed = packed or PackedAttention.from_lengths(share.plan.lengths, share.index.device, attn_type)

    def prepare(self, hidden: Tensor) -> None:
        self.packed.prepare(hidden)

    @torch.compiler.disable
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        group = self.share.cp
        if spec.sinks is not None:
            spec = replace(spec, sinks=spec.sinks.chunk(group.size)[group.rank])
        repeat = ulysses_repeat(q.shape[1], k.shape[1], group.size)
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        q, k, v = (_tokens_to_heads(x, group) for x in (q, k, v))
        return _heads_to_tokens(self.packed.attend(layer, q, k, v, spec), group)

    @torch.compiler.disable
    def recur(self, layer: int, rows: Sequence[Tensor], weights: Sequence[Tensor], scan: Scan) -> Tensor:
        group, heads = self.share.cp, max(x.shape[1] for x in rows)
        repeats = [ulysses_repeat(heads, x.shape[1], group.size) for x in rows]
        rows = [_tokens_to_heads(x.repeat_interleave(n, 1), group) for x, n in zip(rows, repeats, strict=True)]
        own = [
            weight.repeat_interleave(ulysses_repeat(heads, len(weight), group.size), 0).chunk(group.size)[group.rank]
            for weight in weights
        ]
        return _heads_to_tokens(self.packed.recur(layer, rows, own, scan), group)


def _tokens_to_heads(x: Tensor, group: Group) -> Tensor:
    """Returns x [T / cp, H, D], all heads of this rank's tokens, as [T, H / cp, D], this rank's heads of all tokens."""
    by_rank = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    return all_to_all(by_rank.flatten(0, 1), group)


def _heads_to_tokens(x: Tensor, group: Group) -> Tensor:
    by_rank = all_to_all(x.contiguous(), group).unflatten(0, (group.size, -1))
    return by_rank.transpose(0, 1).flatten(1, 2)


class GatheredAttention(ContextParallelAttention):
    """Each rank gathers all keys and values and attends with its own queries, for any number of heads and ranks."""

    def prepare(self, hidden: Tensor) -> None:
        self.backend = resolve_backend(self.attn_type, hidden.device, hidden.dtype)
        assert self.backend.supports_gathered, "checked when the layout is resolved"
        self.keys = GatheredKeys(self.share)
        self.backend.prepare_gathered(self.keys)

    @torch.compiler.disable
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.backend.require(spec)
        return self.backend.gathered(q, all_gather(torch.cat((k, v), dim=1), self.share.cp), self.keys, spec)

    @torch.compiler.disable
    def attend_latent(self, layer: int, q: Tensor, keys: LatentKeys, spec: AttentionSpec) -> Tensor:
        """Gathers the latents, which are narrower than the keys, and expands those of all ranks."""
        self.backend.require(spec)
        adapters = None if keys.adapters is None else keys.adapters.gathered(self.share.cp)
        kv = torch.cat(keys.expand(all_gather(keys.rows, self.share.cp), adapters), dim=1)
        return self.backend.gathered(keys.pad(q), kv, self.keys, spec)[..., : keys.value_features]
