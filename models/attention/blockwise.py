"""Causal and sliding-window attention of documents of equal length, any device and floating dtype.

`blockwise_attention` computes blocks of queries by plain matrix products. Each block multiplies only the keys it can
see; its probabilities stay in the cache and are recomputed for the gradient (as in FlashAttention, Dao et al. 2022,
arXiv:2205.14135, without its running softmax: a block sees all of its keys at once). The query heads that share a key
head are rows of one product, so keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Queries per block; longer documents use the larger block, whose products are more efficient and waste little.
BLOCK, LONG_BLOCK, LONG = 64, 128, 1024
# Bytes of probabilities computed at a time: on a CPU a core's share of the cache, on a GPU more, for fewer launches.
CPU_PROBABILITIES_BYTES, GPU_PROBABILITIES_BYTES = 2 << 20, 64 << 20
# Document length from which blocks of plain products beat torch's CPU kernel: 25 % less time for forward and backward
# at 512 tokens of 8 heads of 64 features, 35 % at 128 features, nothing at 128 tokens.
BLOCKWISE_FROM = 128


class _Blocks:
    """The blocks of documents of one length, and their masks. Heads are grouped: [B * G, H / G, S, D].

    The `queries` of a document are the last of its `keys` tokens.
    """

    def __init__(self, queries: int, keys: int, window: int | None, like: Tensor) -> None:
        self.queries, self.keys = queries, keys
        self.window = window if window is not None and window < keys else None
        self.block = BLOCK if keys < LONG else LONG_BLOCK
        self.like = like
        self.masks: dict[tuple[int, int, int], Tensor] = {}

    def spans(self) -> Iterator[tuple[slice, slice, tuple[int, int, int]]]:
        """Yields each block's rows of the queries, its rows of the keys, and its (first key, first query, end) as
        positions in the document."""
        offset = self.keys - self.queries
        for start in range(offset, self.keys, self.block):
            low, end = 0 if self.window is None else max(0, start - self.window + 1), min(start + self.block, self.keys)
            yield slice(start - offset, end - offset), slice(low, end), (low, start, end)

    def groups(self, heads_per_group: int, groups: int) -> Iterator[slice]:
        """Yields the head groups to compute at a time."""
        size = heads_per_group * self.block * self.keys * self.like.element_size()
        budget = CPU_PROBABILITIES_BYTES if self.like.device.type == "cpu" else GPU_PROBABILITIES_BYTES
        step = max(1, budget // size)
        return (slice(start, start + step) for start in range(0, groups, step))

    def probabilities(self, q: Tensor, k: Tensor, low: int, start: int, end: int) -> Tensor:
        """Returns the softmax [g, rows, end - low] of scaled q [g, heads * queries, D] over k [g, end - low, D]."""
        scores = torch.bmm(q, k.transpose(1, 2))
        by_query = scores.view(scores.shape[0], -1, end - start, end - low)
        if self.window is None:
            by_query[..., start - low :].add_(self._mask(start, start, end))
        else:
            by_query.add_(self._mask(low, start, end))
        return torch.softmax(scores, dim=-1)

    def _mask(self, low: int, start: int, end: int) -> Tensor:
        """Returns [end - start, end - low]: 0 where query start + i sees key low + j, else -inf."""
        key = (start - low, end - start, end - low)
        if key not in self.masks:
            i = torch.arange(start, end, device=self.like.device).unsqueeze(1)
            j = torch.arange(low, end, device=self.like.device)
            hidden = j > i
            if self.window is not None:
                hidden |= j <= i - self.window
            self.masks[key] = torch.zeros_like(hidden, dtype=self.like.dtype).masked_fill_(hidden, -torch.inf)
        return self.masks[key]


def group_heads(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Returns x [B, S, H, D] as a contiguous [B * groups, H / groups, S, D]."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1).to(dtype).contiguous()


def ungroup_heads(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """Returns x [B * G, R, S, D] as a contiguous [B, S, G * R, D]."""
    return x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
        batch, length, groups = k.shape[:3]
        wide = torch.promote_types(q.dtype, torch.float32)
        q_NRSD, k_NSD, v_NSD = (group_heads(x, groups, wide) for x in (q, k, v))
        q_NRSD, k_NSD, v_NSD = q_NRSD * scale, k_NSD.squeeze(1), v_NSD.squeeze(1)
        blocks, out = _Blocks(q.shape[1], length, window, q_NRSD), torch.empty_like(q_NRSD)
        for n in blocks.groups(q_NRSD.shape[1], q_NRSD.shape[0]):
            for queries, keys, tokens in blocks.spans():
                rows = q_NRSD[n, :, queries]
                p = blocks.probabilities(rows.flatten(1, 2), k_NSD[n, keys], *tokens)
                out[n, :, queries] = torch.bmm(p, v_NSD[n, keys]).view(rows.shape)
        ctx.save_for_backward(q_NRSD, k_NSD, v_NSD)
        ctx.constants = (batch, window, scale, q.dtype)
        return ungroup_heads(out, batch, q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_NRSD, k_NSD, v_NSD = ctx.saved_tensors
        batch, window, scale, dtype = ctx.constants
        grad_NRSD = group_heads(grad, k_NSD.shape[0] // batch, q_NRSD.dtype)
        blocks = _Blocks(q_NRSD.shape[2], k_NSD.shape[1], window, q_NRSD)
        dq, dk, dv = torch.empty_like(q_NRSD), torch.zeros_like(k_NSD), torch.zeros_like(v_NSD)
        for n in blocks.groups(q_NRSD.shape[1], q_NRSD.shape[0]):
            for queries, keys, tokens in blocks.spans():
                rows, seen = q_NRSD[n, :, queries], k_NSD[n, keys]
                q_rows, grad_rows = rows.flatten(1, 2), grad_NRSD[n, :, queries].flatten(1, 2)
                p = blocks.probabilities(q_rows, seen, *tokens)
                dv[n, keys].baddbmm_(p.transpose(1, 2), grad_rows)
                dp = torch.bmm(grad_rows, v_NSD[n, keys].transpose(1, 2))
                ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
                dq[n, :, queries] = torch.bmm(ds, seen).view(rows.shape)
                dk[n, keys].baddbmm_(ds.transpose(1, 2), q_rows)
        dk, dv = (ungroup_heads(x.unsqueeze(1), batch, dtype) for x in (dk, dv))
        return ungroup_heads(dq.mul_(scale), batch, dtype), dk, dv, None, None


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
    """See `batched_attention`; always in blocks, and computed in at least float32."""
    return _BlockwiseAttention.apply(q, k, v, window, scale)


def batched_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
    """Returns causal attention [B, S, H, D] of B documents of L tokens, of which the last S are queries.

    Uses `scaled_dot_product_attention` for short documents, and on a GPU for all without a window; blocks otherwise.

    Args:
        q: [B, S, H, D]; k, v: [B, L, G, D] with H a multiple of G.
        window, scale: see `AttentionSpec`.
    """
    queries, length = q.shape[1], k.shape[1]
    if (window is not None and window < length) or (q.device.type == "cpu" and length >= BLOCKWISE_FROM):
        return blockwise_attention(q, k, v, window=window, scale=scale)
    if queries == length:
        return _kernel_attention(q, k, v, None, scale)
    # The kernel's own causal mask aligns the first query with the first key. No mask is larger than [block, L].
    outs: list[Tensor] = []
    for block in q.split(LONG_BLOCK, dim=1):
        first = length - queries + len(outs) * LONG_BLOCK
        stop = first + block.shape[1]
        mask = torch.ones(block.shape[1], stop, dtype=torch.bool, device=q.device).tril(first)
        outs.append(_kernel_attention(block, k[:, :stop], v[:, :stop], mask, scale))
    return torch.cat(outs, dim=1)


def _kernel_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    q_BHSD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(
        q_BHSD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out.transpose(1, 2)
