"""Attention by the flash-attn package (Dao 2023, arXiv:2307.08691), where it is installed.

Contract-tested against a reference of flash-attn's interface; unverified on a GPU until a record says otherwise.
"""

from __future__ import annotations

from torch import Tensor


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, window: int | None, scale: float
) -> Tensor:
    """Causal attention of packed documents: q [T, H, D], k and v [T, G, D], cu_seqlens int32 [B + 1] to [T, H, D]."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=True,
        # (left, right) neighbours a token sees besides itself; -1 is without bound.
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
