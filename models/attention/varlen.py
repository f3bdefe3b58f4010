"""PyTorch's own variable-length FlashAttention (`torch.nn.attention.varlen`): CUDA, half precision."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend, half_precision_on_cuda
from archon.models.attention.documents import GatheredKeys, PackedDocuments
from archon.models.attention.spec import AttentionSpec


class VarlenAttention(AttentionBackend):
    """`varlen_attn`."""

    name = "varlen"
    saved_ops = frozenset({"torch_attn::_varlen_attn"})

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return half_precision_on_cuda(device, dtype)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        bounds, longest = documents.cu_seqlens, documents.max_seqlen
        return _varlen(q, k, v, bounds, bounds, longest, longest, spec)

    def prepare_gathered(self, keys: GatheredKeys) -> None:
        _ = keys.rows_of_chunks, keys.cu_queries, keys.cu_keys

    def gathered(self, q: Tensor, kv: Tensor, keys: GatheredKeys, spec: AttentionSpec) -> Tensor:
        # A document's last query meets its last key, so a chunk's queries are the end of the keys it is given.
        k, v = keys.of_chunks(kv)
        return _varlen(q, k, v, keys.cu_queries, keys.cu_keys, keys.max_queries, keys.max_keys, spec)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, spec: AttentionSpec
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    gqa: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _asks_for_gqa() else {}
    # (left, right): neighbours a token sees besides itself; -1 is without bound.
    window = (-1 if spec.window is None else spec.window - 1, 0)
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=spec.scale, window_size=window, **gqa)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _asks_for_gqa() -> bool:
    """Whether this torch wants to be told of fewer key heads than query heads, as 2.13 does."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
