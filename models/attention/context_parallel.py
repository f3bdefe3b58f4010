"""Attention under context parallelism: each rank holds a token shard of the pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from archon.models.attention.latent import LatentKeys
from archon.models.attention.meta import AttentionMeta, PackedAttention, Scan
from archon.models.attention.packed.documents import GatheredKeys
from archon.models.attention.registry import available_backends, backend_for_layer
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.parallel.comm import Group, all_gather, all_to_all
from archon.parallel.context import SequenceShard, ulysses_repeat


class ContextParallelAttention(AttentionMeta):
    """Base class; `shard` has the documents of the full pack and this rank's tokens."""

    def __init__(self, shard: SequenceShard, attn_type: str) -> None:
        self.shard, self.attn_type, self.valid_mask = shard, attn_type, shard.valid_mask

    def document_lengths(self, positions: Tensor) -> Tensor:
        """See `AttentionMeta.document_lengths`."""
        lengths = torch.tensor(self.shard.plan.lengths)
        return self.shard.take_cpu(lengths.repeat_interleave(lengths), 0)


class UlyssesAttention(ContextParallelAttention):
    """Each rank attends over the full pack with some of the heads (Jacobs et al. 2023, arXiv:2309.14509).

    Key heads are repeated if there are fewer of them than ranks. `shard` must be contiguous; `packed` is the attention
    over the full pack, by default within its documents.
    """

    def __init__(self, shard: SequenceShard, attn_type: str, packed: AttentionMeta | None = None) -> None:
        super().__init__(shard, attn_type)
        self.packed = packed or PackedAttention.from_lengths(shard.plan.lengths, shard.index.device, attn_type)

    def prepare(self, hidden: Tensor) -> None:
        """See `AttentionMeta.prepare`."""
        self.packed.prepare(hidden)

    @torch.compiler.disable
    def attend(self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionMeta.attend`."""
        group = self.shard.cp
        if spec.sinks is not None:
            spec = replace(spec, sinks=spec.sinks.chunk(group.size)[group.rank])
        repeat = ulysses_repeat(q.shape[1], k.shape[1], group.size)
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        q, k, v = (_tokens_to_heads(x, group) for x in (q, k, v))
        return _heads_to_tokens(self.packed.attend(layer, q, k, v, spec), group)

    @torch.compiler.disable
    def run_recurrence(
        self, layer: LayerIndex, rows: Sequence[Tensor], weights: Sequence[Tensor], scan: Scan
    ) -> Tensor:
        """See `AttentionMeta.run_recurrence`."""
        group, heads = self.shard.cp, max(x.shape[1] for x in rows)
        repeats = [ulysses_repeat(heads, x.shape[1], group.size) for x in rows]
        rows = [_tokens_to_heads(x.repeat_interleave(n, 1), group) for x, n in zip(rows, repeats, strict=True)]
        local_weights = [
            weight.repeat_interleave(ulysses_repeat(heads, len(weight), group.size), 0).chunk(group.size)[group.rank]
            for weight in weights
        ]
        return _heads_to_tokens(self.packed.run_recurrence(layer, rows, local_weights, scan), group)


def _tokens_to_heads(x: Tensor, group: Group) -> Tensor:
    """Exchange x [T / cp, H, D] (local tokens, all heads) for [T, H / cp, D] (all tokens, local heads)."""
    by_rank = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    return all_to_all(by_rank.flatten(0, 1), group)


def _heads_to_tokens(x: Tensor, group: Group) -> Tensor:
    by_rank = all_to_all(x.contiguous(), group).unflatten(0, (group.size, -1))
    return by_rank.transpose(0, 1).flatten(1, 2)


class GatheredAttention(ContextParallelAttention):
    """Each rank gathers all keys and values and attends with its queries; any number of heads and ranks."""

    def prepare(self, hidden: Tensor) -> None:
        """See `AttentionMeta.prepare`."""
        available = available_backends(self.attn_type, hidden.device, hidden.dtype)
        self.backends = [backend for backend in available if backend.supports_gathered]
        self.keys = GatheredKeys(self.shard)
        for backend in self.backends:
            backend.prepare_gathered(self.keys)

    @torch.compiler.disable
    def attend(self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionMeta.attend`."""
        backend = backend_for_layer(self.backends, spec, q.shape[-1])
        return backend.attend_gathered(q, all_gather(torch.cat((k, v), dim=1), self.shard.cp), self.keys, spec)

    @torch.compiler.disable
    def attend_latent(self, layer: LayerIndex, q: Tensor, keys: LatentKeys, spec: AttentionSpec) -> Tensor:
        """Gather the latents, which are narrower than keys, and expand the latents of all ranks."""
        lora_mapping = None if keys.lora_mapping is None else keys.lora_mapping.gathered(self.shard.cp)
        kv = torch.cat(keys.expand(all_gather(keys.rows, self.shard.cp), lora_mapping), dim=1)
        q = keys.pad(q)
        backend = backend_for_layer(self.backends, spec, q.shape[-1])
        return backend.attend_gathered(q, kv, self.keys, spec)[..., : keys.value_features]
