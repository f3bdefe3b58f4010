"""PyTorch's own variable-length FlashAttention (`torch.nn.attention.varlen`): CUDA, half precision."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend, flash_unsupported_reason
from archon.models.attention.documents import GatheredKeys, PackedDocuments
from archon.models.attention.spec import AttentionSpec


class VarlenAttention(AttentionBackend):
    """`varlen_attn`."""

    name = "varlen"
    saved_ops = frozenset({"torch_attn::_varlen_attn"})

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return flash_unsupported_reason(device, dtype)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        cu_seqlens, max_seqlen = documents.cu_seqlens, documents.max_seqlen
        return _varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, spec)

    def prepare_gathered(self, keys: GatheredKeys) -> None:
        _ = keys.chunk_rows, keys.cu_seqlens

    def gathered(self, q: Tensor, kv: Tensor, keys: GatheredKeys, spec: AttentionSpec) -> Tensor:
        # The kernel aligns the last query with the last key, so a chunk's queries are the last of its keys.
        k, v = keys.by_chunk(kv)
        return _varlen(q, k, v, *keys.cu_seqlens, keys.max_queries, keys.max_keys, spec)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, spec: AttentionSpec
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    gqa: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _has_enable_gqa() else {}
    # (left, right): neighbors that a token sees besides itself; -1 for all.
    window = (-1 if spec.window is None else spec.window - 1, 0)
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=spec.scale, window_size=window, **gqa)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _has_enable_gqa() -> bool:
    """Returns whether this torch needs `enable_gqa` for fewer key heads than query heads, as 2.13 does."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
