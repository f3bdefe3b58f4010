"""Attention by `scaled_dot_product_attention`, document by document: no mask ever spans the pack.

Neighbouring documents of one length go through the kernel as one batch. A sliding window runs in blocks of queries,
each against just the keys it can see, so that the largest mask is [block, block + window - 1].
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_BLOCK, MAX_BLOCK = 64, 1024


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, window: int | None, scale: float
) -> Tensor:
    """Causal attention of packed documents; q [T, H, D], k and v [T, G, D], lengths of sum T; gives [T, H, D]."""
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"documents of {sum(lengths)} tokens in all, but {q.shape[0]} tokens were given")
    runs = [(length, len(list(same))) for length, same in groupby(length for length in lengths if length)]
    sizes = [length * count for length, count in runs]
    outs = []
    for (length, count), *qkv in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        q_BHSD, k_BGSD, v_BGSD = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        outs.append(_attend_batch(q_BHSD, k_BGSD, v_BGSD, window, scale).transpose(1, 2).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_batch(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """q [B, H, S, D], k and v [B, G, S, D]: B documents of S tokens."""
    length, gqa = q.shape[2], q.shape[1] != k.shape[1]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    return _attend_window(q, k, v, window, scale)


def _attend_window(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """The first `window` queries see all before them; every later one sees exactly `window` keys, in blocks."""
    length, gqa = q.shape[2], q.shape[1] != k.shape[1]
    block = min(max(window, MIN_BLOCK), MAX_BLOCK)
    blocks, rest = divmod(length - window, block)
    head = F.scaled_dot_product_attention(
        q[:, :, :window], k[:, :, :window], v[:, :, :window], is_causal=True, scale=scale, enable_gqa=gqa
    )
    outs = [head]
    # Query window + i sees keys i + 1 .. window + i: within a block, key j of its slice for i <= j < i + window.
    reach = block + window - 1
    offsets = torch.arange(reach, device=q.device) - torch.arange(block, device=q.device).unsqueeze(1)
    band = (offsets >= 0) & (offsets < window)
    for i in range(blocks + bool(rest)):
        size = block if i < blocks else rest
        start = i * block
        outs.append(
            F.scaled_dot_product_attention(
                q[:, :, window + start : window + start + size],
                k[:, :, start + 1 : start + window + size],
                v[:, :, start + 1 : start + window + size],
                attn_mask=band[:size, : size + window - 1],
                scale=scale,
                enable_gqa=gqa,
            )
        )
    return torch.cat(outs, dim=2)
