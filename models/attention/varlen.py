"""PyTorch's own variable-length FlashAttention (`torch.nn.attention.varlen`): CUDA, half precision."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor


@functools.cache
def _asks_for_gqa() -> bool:
    """Whether this torch wants to be told of fewer key heads than query heads, as 2.13 does."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    window: int | None,
    scale: float,
    cu_seqlens_k: Tensor | None = None,
    max_k: int | None = None,
) -> Tensor:
    """Causal attention of packed documents: q [T, H, D], k and v [T, G, D], cu_seqlens int32 [B + 1] to [T, H, D].

    With `cu_seqlens_k` and `max_k` the keys are others than the queries: a document's last query meets its last key.
    """
    from torch.nn.attention.varlen import varlen_attn

    gqa: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _asks_for_gqa() else {}
    # (left, right): neighbours a token sees besides itself; -1 is without bound.
    left = -1 if window is None else window - 1
    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen,
        max_k or max_seqlen,
        scale=scale,
        window_size=(left, 0),
        **gqa,
    )
    assert isinstance(out, Tensor)
    return out
