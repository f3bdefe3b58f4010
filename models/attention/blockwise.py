"""Causal and sliding-window attention in blocks of queries, by plain matrix products.

A block of queries meets just the keys it can see; its probabilities live in the cache, are used at once and made again
for the gradient (as in FlashAttention, Dao et al. 2022, arXiv:2205.14135, without its running softmax: a block sees its
keys all at once). The query heads that share a key head form the rows of one product, so keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows of a block; longer documents take the larger, whose products are more efficient and whose waste is small.
BLOCK, LONG_BLOCK, LONG = 64, 128, 1024
# Bytes of probabilities at a time: what a core's share of the cache holds.
PROBABILITIES_BYTES = 2 << 20


class _Blocks:
    """Where the blocks of documents of one length lie and what each masks. Heads are grouped: [B * G, H / G, S, D].

    There are `queries` queries a document, the last of its `keys` tokens.
    """

    def __init__(self, queries: int, keys: int, window: int | None, like: Tensor) -> None:
        self.queries, self.keys = queries, keys
        self.window = window if window is not None and window < keys else None
        self.block = BLOCK if keys < LONG else LONG_BLOCK
        self.like = like
        self.masks: dict[tuple[int, int, int], Tensor] = {}

    def spans(self) -> Iterator[tuple[slice, slice, tuple[int, int, int]]]:
        """Rows of each block among the queries, rows it sees among the keys, and both as tokens of the document:
        (first key, first query, end)."""
        before = self.keys - self.queries
        for start in range(before, self.keys, self.block):
            low, end = 0 if self.window is None else max(0, start - self.window + 1), min(start + self.block, self.keys)
            yield slice(start - before, end - before), slice(low, end), (low, start, end)

    def groups(self, heads_per_group: int, groups: int) -> Iterator[slice]:
        """How many groups of heads to take at a time."""
        size = heads_per_group * self.block * self.keys * self.like.element_size()
        step = max(1, PROBABILITIES_BYTES // size)
        return (slice(start, start + step) for start in range(0, groups, step))

    def probabilities(self, q: Tensor, k: Tensor, low: int, start: int, end: int) -> Tensor:
        """softmax [g, rows, end - low] of q [g, rows, D], scaled, over k [g, end - low, D]; rows: heads x queries."""
        scores = torch.bmm(q, k.transpose(1, 2))
        by_query = scores.view(scores.shape[0], -1, end - start, end - low)
        if self.window is None:
            by_query[..., start - low :].add_(self._mask(start, start, end))
        else:
            by_query.add_(self._mask(low, start, end))
        return torch.softmax(scores, dim=-1)

    def _mask(self, low: int, start: int, end: int) -> Tensor:
        """0 where query start + i sees key low + j, else -inf; [end - start, end - low]."""
        key = (start - low, end - start, end - low)
        if key not in self.masks:
            i = torch.arange(start, end, device=self.like.device).unsqueeze(1)
            j = torch.arange(low, end, device=self.like.device)
            hidden = j > i
            if self.window is not None:
                hidden |= j <= i - self.window
            self.masks[key] = torch.zeros_like(hidden, dtype=self.like.dtype).masked_fill_(hidden, -torch.inf)
        return self.masks[key]


def grouped(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[B, S, H, D] to a contiguous [B * groups, H / groups, S, D]."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1).to(dtype).contiguous()


def ungrouped(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """[B * G, R, S, D] to a contiguous [B, S, G * R, D]."""
    return x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
        batch, length, groups = k.shape[:3]
        wide = torch.promote_types(q.dtype, torch.float32)
        q_NRSD, k_NSD, v_NSD = (grouped(x, groups, wide) for x in (q, k, v))
        q_NRSD, k_NSD, v_NSD = q_NRSD * scale, k_NSD.squeeze(1), v_NSD.squeeze(1)
        blocks, out = _Blocks(q.shape[1], length, window, q_NRSD), torch.empty_like(q_NRSD)
        for n in blocks.groups(q_NRSD.shape[1], q_NRSD.shape[0]):
            for queries, keys, tokens in blocks.spans():
                rows = q_NRSD[n, :, queries]
                p = blocks.probabilities(rows.flatten(1, 2), k_NSD[n, keys], *tokens)
                out[n, :, queries] = torch.bmm(p, v_NSD[n, keys]).view(rows.shape)
        ctx.save_for_backward(q_NRSD, k_NSD, v_NSD)
        ctx.constants = (batch, window, scale, q.dtype)
        return ungrouped(out, batch, q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_NRSD, k_NSD, v_NSD = ctx.saved_tensors
        batch, window, scale, dtype = ctx.constants
        grad_NRSD = grouped(grad, k_NSD.shape[0] // batch, q_NRSD.dtype)
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
        dk, dv = (ungrouped(x.unsqueeze(1), batch, dtype) for x in (dk, dv))
        return ungrouped(dq.mul_(scale), batch, dtype), dk, dv, None, None


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
    """Causal attention of B documents of S tokens, computed in at least float32.

    Args:
        q: [B, Q, H, D], the last Q <= S tokens of each document; k, v: [B, S, G, D] with H a multiple of G.
        window: each token sees itself and the window - 1 tokens before it; None for all.
        scale: factor on the scores before the softmax.

    Returns:
        [B, Q, H, D] in q's dtype.
    """
    return _BlockwiseAttention.apply(q, k, v, window, scale)
