"""Causal and sliding-window attention of documents of equal length, any device and floating dtype.

`blockwise_attention` computes blocks of queries by plain matmuls. Each block multiplies only its visible keys; its
probabilities stay in the cache and are recomputed for the gradient (as in FlashAttention, Dao et al. 2022,
arXiv:2205.14135, without the running softmax: a block has all of its keys at once). The query heads of one key head
are rows of one matmul, so keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from archon.models.attention.spec import AttentionSpec
from archon.parallel.torch_private import softmax_backward

# Queries per block. From LONG keys on, the larger block has more efficient matmuls and wastes little.
BLOCK, LONG_BLOCK, LONG = 64, 128, 1024
# Bytes of probabilities computed at a time: on a CPU the cache of one core, on a GPU more, for fewer launches.
CPU_PROBABILITIES_BYTES, GPU_PROBABILITIES_BYTES = 2 << 20, 64 << 20
# Lengths of documents for which blocks of plain products beat torch's CPU kernel: 25 % less time for forward and
# backward at 512 tokens of 8 heads of 64 features, 35 % at 128 features, nothing at 128 tokens. From 2,048, where
# the probabilities of a block leave the cache, the kernel takes less: 10 %, and 19 % at 8,192.
BLOCKWISE_FROM, BLOCKWISE_BELOW = 128, 2048


class _Blocks:
    """Query blocks of documents of one length, and their masks. Heads are grouped: [B * G, H / G, S, D].

    The `queries` are the last of a document's `keys` tokens. Sinks [B * G, H / G] are one more column of the scores, a
    key without a value.
    """

    def __init__(self, queries: int, keys: int, spec: AttentionSpec, sinks: Tensor | None, like: Tensor) -> None:
        self.queries, self.keys = queries, keys
        self.window = spec.window if spec.window is not None and spec.window < keys else None
        self.soft_cap, self.sinks = spec.soft_cap, sinks
        self.block = BLOCK if keys < LONG else LONG_BLOCK
        self.like = like
        self.masks: dict[tuple[int, int, int], Tensor] = {}

    def spans(self) -> Iterator[tuple[slice, slice, tuple[int, int, int]]]:
        """Yield each block's slice of the queries, its slice of the keys, and (first key, first query, end).

        The last three are positions in the document.
        """
        offset = self.keys - self.queries
        for start in range(offset, self.keys, self.block):
            low, end = 0 if self.window is None else max(0, start - self.window + 1), min(start + self.block, self.keys)
            yield slice(start - offset, end - offset), slice(low, end), (low, start, end)

    def groups(self, heads_per_group: int, groups: int) -> Iterator[slice]:
        """Yield slices of head groups; the probabilities of one slice fit the budget."""
        size = heads_per_group * self.block * self.keys * self.like.element_size()
        budget = CPU_PROBABILITIES_BYTES if self.like.device.type == "cpu" else GPU_PROBABILITIES_BYTES
        step = max(1, budget // size)
        return (slice(start, start + step) for start in range(0, groups, step))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b, with room for the sinks in a last column."""
        if self.sinks is None:
            return torch.bmm(a, b)
        out = a.new_empty(a.shape[0], a.shape[1], b.shape[2] + 1)
        torch.bmm(a, b, out=out[..., :-1])
        return out

    def drop_sink_column(self, x: Tensor) -> Tensor:
        return x if self.sinks is None else x[..., :-1]

    def probabilities(
        self, n: slice, q: Tensor, k: Tensor, span: tuple[int, int, int], *, needs_slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the softmax over keys and sinks, and optionally the slope of the soft cap.

        Args:
            n: the head groups of q and k.
            q: scaled, [g, heads * queries, D].
            k: [g, end - low, D].
            span: (low, start, end), see `spans`.
            needs_slope: return the soft cap's slope [g, rows, end - low] too.
        """
        low, start, end = span
        columns = self.product(q, k.transpose(1, 2))
        scores, slope = self.drop_sink_column(columns), None
        if self.soft_cap is not None:
            scores.div_(self.soft_cap).tanh_()
            slope = scores.square().neg_().add_(1) if needs_slope else None
            scores.mul_(self.soft_cap)
        by_query = scores.view(scores.shape[0], -1, end - start, end - low)
        if self.window is None:
            by_query[..., start - low :].add_(self._mask(start, start, end))
        else:
            by_query.add_(self._mask(low, start, end))
        if self.sinks is not None:
            columns[..., -1].view(by_query.shape[:3]).copy_(self.sinks[n].unsqueeze(-1))
        return torch.softmax(columns, dim=-1), slope

    def _mask(self, low: int, start: int, end: int) -> Tensor:
        """Return [end - start, end - low]: 0 where query start + i sees key low + j, else -inf."""
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
    """Return x [B, S, H, D] as a contiguous [B * groups, H / groups, S, D]."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1).to(dtype).contiguous()


def ungroup_heads(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """Return x [B * G, R, S, D] as a contiguous [B, S, G * R, D]."""
    return x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spec: AttentionSpec) -> Tensor:
        batch, length, groups = k.shape[:3]
        wide = torch.promote_types(q.dtype, torch.float32)
        q_NRSD, k_NSD, v_NSD = (group_heads(x, groups, wide) for x in (q, k, v))
        q_NRSD, k_NSD, v_NSD = q_NRSD * spec.scale, k_NSD.squeeze(1), v_NSD.squeeze(1)
        sinks_NR = None if sinks is None else sinks.to(wide).view(groups, -1).repeat(batch, 1)
        blocks = _Blocks(q.shape[1], length, spec, sinks_NR, q_NRSD)
        out = q_NRSD.new_empty(*q_NRSD.shape[:3], v.shape[3])
        for n in blocks.groups(q_NRSD.shape[1], q_NRSD.shape[0]):
            for queries, keys, span in blocks.spans():
                rows = q_NRSD[n, :, queries]
                p, _ = blocks.probabilities(n, rows.flatten(1, 2), k_NSD[n, keys], span)
                out[n, :, queries] = torch.bmm(blocks.drop_sink_column(p), v_NSD[n, keys]).unflatten(1, rows.shape[1:3])
        ctx.save_for_backward(q_NRSD, k_NSD, v_NSD, sinks_NR)
        ctx.constants = (batch, spec, q.dtype, None if sinks is None else sinks.dtype)
        return ungroup_heads(out, batch, q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_NRSD, k_NSD, v_NSD, sinks_NR = ctx.saved_tensors
        batch, spec, dtype, sinks_dtype = ctx.constants
        grad_NRSD = group_heads(grad, k_NSD.shape[0] // batch, q_NRSD.dtype)
        blocks = _Blocks(q_NRSD.shape[2], k_NSD.shape[1], spec, sinks_NR, q_NRSD)
        dq, dk, dv = torch.empty_like(q_NRSD), torch.zeros_like(k_NSD), torch.zeros_like(v_NSD)
        dsinks = None if sinks_NR is None else torch.zeros_like(sinks_NR)
        for n in blocks.groups(q_NRSD.shape[1], q_NRSD.shape[0]):
            for queries, keys, span in blocks.spans():
                rows, visible = q_NRSD[n, :, queries], k_NSD[n, keys]
                q_rows, grad_rows = rows.flatten(1, 2), grad_NRSD[n, :, queries].flatten(1, 2)
                p, slope = blocks.probabilities(n, q_rows, visible, span, needs_slope=True)
                dv[n, keys].baddbmm_(blocks.drop_sink_column(p).transpose(1, 2), grad_rows)
                dp = blocks.product(grad_rows, v_NSD[n, keys].transpose(1, 2))
                if dsinks is not None:
                    dp[..., -1].zero_()
                ds = softmax_backward(dp, p, -1, p.dtype)
                if dsinks is not None:
                    dsinks[n] += ds[..., -1].unflatten(1, rows.shape[1:3]).sum(-1)
                    ds = ds[..., :-1]
                if slope is not None:
                    ds.mul_(slope)
                dq[n, :, queries] = torch.bmm(ds, visible).view(rows.shape)
                dk[n, keys].baddbmm_(ds.transpose(1, 2), q_rows)
        if dsinks is not None:
            dsinks = dsinks.view(batch, -1).sum(0).to(sinks_dtype)
        dk, dv = (ungroup_heads(x.unsqueeze(1), batch, dtype) for x in (dk, dv))
        return ungroup_heads(dq.mul_(spec.scale), batch, dtype), dk, dv, dsinks, None


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Compute `batched_attention` in blocks, in at least float32."""
    return _BlockwiseAttention.apply(q, k, v, spec.sinks, replace(spec, sinks=None))


def batched_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Return attention [B, S, H, E] of B documents of L tokens; the last S are queries.

    Shapes: q [B, S, H, D], k [B, L, G, D] with H a multiple of G, v [B, L, G, E]. Short and long documents, and on a
    GPU all without a window, use `scaled_dot_product_attention`. The others, soft-capped scores and sinks use blocks.
    """
    queries, length = q.shape[1], k.shape[1]
    if not spec.causal:
        return _kernel_attention(q, k, v, None, spec.scale, causal=False)
    plain = spec.soft_cap is None and spec.sinks is None and (spec.window is None or spec.window >= length)
    in_blocks = length >= BLOCKWISE_FROM and (length < BLOCKWISE_BELOW or queries < length)
    if not plain or (q.device.type == "cpu" and in_blocks):
        return blockwise_attention(q, k, v, spec)
    if queries == length:
        return _kernel_attention(q, k, v, None, spec.scale)
    # The kernel's causal mask would align the first query with the first key. No mask is larger than [block, L].
    outs: list[Tensor] = []
    for block in q.split(LONG_BLOCK, dim=1):
        first = length - queries + len(outs) * LONG_BLOCK
        stop = first + block.shape[1]
        mask = torch.ones(block.shape[1], stop, dtype=torch.bool, device=q.device).tril(first)
        outs.append(_kernel_attention(block, k[:, :stop], v[:, :stop], mask, spec.scale))
    return torch.cat(outs, dim=1)


def _kernel_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = True
) -> Tensor:
    gqa = q.shape[2] != k.shape[2]
    few = k.shape[0] * k.shape[2] < 2 * torch.get_num_threads()
    if gqa and few and q.device.type == "cpu" and q.shape[1] >= BLOCKWISE_BELOW:
        # The CPU kernel's backward gives each key head to one thread; repeated heads use all threads.
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        gqa = False
    q_BHSD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q_BHSD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=gqa
    )
    return out.transpose(1, 2)
