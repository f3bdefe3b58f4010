"""A reference backend of plain matrix products, in any dtype and on any device: all that adding one takes."""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend
from archon.models.attention.packed.documents import GatheredKeys, PackedDocuments
from archon.models.attention.registry import register_attention_backend
from archon.models.attention.spec import AttentionSpec


class NaiveAttention(AttentionBackend):
    """softmax(q k' scale) v, one document at a time, with the whole matrix of its scores."""

    name = "naive"
    features = frozenset({"window", "soft_cap", "sinks"})
    saved_ops = frozenset({"aten::bmm"})

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        parts = zip(*(x.split(documents.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*document, spec) for document in parts])

    def attend_gathered(self, q: Tensor, kv: Tensor, keys: GatheredKeys, spec: AttentionSpec) -> Tensor:
        k, v = keys.in_pack_order(kv)
        spans = [slice(first, first + count) for first, count in keys.key_spans]
        queries = q.split(keys.query_lengths)
        return torch.cat([attend(own, k[s], v[s], spec) for own, s in zip(queries, spans, strict=True)])


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """The queries [S, H, D] of the last tokens of k and v [L, G, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    ahead = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
    hidden = (ahead < 0) if spec.window is None else (ahead < 0) | (ahead >= spec.window)
    scores = torch.bmm(q.transpose(0, 1), k.permute(1, 2, 0)) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if spec.sinks is not None:
        total = total + spec.sinks.exp()[:, None, None]
    return torch.bmm(weights / total, v.transpose(0, 1)).transpose(0, 1)


register_attention_backend(NaiveAttention())
