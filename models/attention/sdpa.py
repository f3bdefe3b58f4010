"""Attention document by document: no mask ever spans the pack. CPU and GPU, any floating dtype.

Neighbouring documents of one length go through the kernel as one batch. `scaled_dot_product_attention` does short
documents, and all that have no window on a GPU; the rest goes in blocks of queries.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from archon.models.attention.blockwise import blockwise_attention

# From this length on, blocks of plain products beat torch's CPU kernel: 25 % less time for forward and backward at 512
# tokens of 8 heads of 64 features, 35 % at 128 features, nothing at 128 tokens; the kernel wins below.
BLOCKWISE_FROM = 128


def check_lengths(documents: int, tokens: int) -> None:
    """Raise ValueError unless the documents' tokens are those given."""
    if documents != tokens:
        raise ValueError(f"documents of {documents} tokens in all, but {tokens} tokens were given; check cu_seqlens")


@torch.compiler.disable
def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, window: int | None, scale: float
) -> Tensor:
    """Causal attention of packed documents: q [T, H, D], k and v [T, G, D], lengths of sum T to [T, H, D].

    Eager under `torch.compile`, which would otherwise compile anew for every set of lengths.
    """
    check_lengths(sum(lengths), q.shape[0])
    runs = [(length, len(list(same))) for length, same in groupby(length for length in lengths if length)]
    sizes = [length * count for length, count in runs]
    outs = []
    for (length, count), *qkv in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        q_BSHD, k_BSGD, v_BSGD = (x.unflatten(0, (count, length)) for x in qkv)
        outs.append(attend_alike(q_BSHD, k_BSGD, v_BSGD, window, scale).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def attend_alike(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """q [B, S, H, D], the last S of B documents' L tokens, k and v [B, L, G, D], to [B, S, H, D]."""
    length, before = k.shape[1], k.shape[1] - q.shape[1]
    if (window is not None and window < length) or (q.device.type == "cpu" and length >= BLOCKWISE_FROM):
        return blockwise_attention(q, k, v, window=window, scale=scale)
    gqa = q.shape[2] != k.shape[2]
    q_BHSD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (q, k, v))
    # The kernel's own causal mask would let the first query meet the first key alone.
    mask = torch.ones(q.shape[1], length, dtype=torch.bool, device=q.device).tril(before) if before else None
    out = F.scaled_dot_product_attention(
        q_BHSD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out.transpose(1, 2)
