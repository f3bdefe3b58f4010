"""PyTorch's own variable-length FlashAttention (`torch.nn.attention.varlen`): CUDA, half precision."""

from __future__ import annotations

from torch import Tensor


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, window: int | None, scale: float
) -> Tensor:
    """Causal attention of packed documents: q [T, H, D], k and v [T, G, D], cu_seqlens int32 [B + 1] to [T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        # (left, right) neighbours a token sees besides itself; -1 is without bound.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out
