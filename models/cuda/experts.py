"""Kernels around the grouped matmuls of experts: sort tokens by expert, gather, weigh and sum their rows.

Every sum is in float32 and in a fixed order, so results are the same in every run; each is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs that one program sorts by comparing each with each.
_PAIRS = 128
# Tokens of a program of the router, and elements of its tile of tokens times experts.
_TOKENS, _TILE = 64, 4096


@triton.jit
def _count_groups(Groups, Counts, n_pairs, n_groups, PAIRS: tl.constexpr, GROUPS: tl.constexpr):
    block, pair = tl.program_id(0), tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    group, bin_ = tl.load(Groups + pair, mask=pair < n_pairs, other=n_groups), tl.arange(0, GROUPS)
    counts = tl.histogram(group.to(tl.int32), GROUPS)
    tl.store(Counts + bin_ * tl.num_programs(0) + block, counts, mask=bin_ < n_groups)


@triton.jit
def _place_pairs(
    Groups, Ends, Positions, Counts, n_pairs, n_groups, n_blocks, PAIRS: tl.constexpr, GROUPS: tl.constexpr
):
    # 1. Add the number of pairs of the same group before a pair: in earlier blocks, and in its block.
    block, first = tl.program_id(0), tl.program_id(0) * PAIRS
    pair, other = first + tl.arange(0, PAIRS), first + tl.arange(0, PAIRS)
    group = tl.load(Groups + pair, mask=pair < n_pairs, other=n_groups)
    other_group = tl.load(Groups + other, mask=other < n_pairs, other=n_groups)
    before = group * n_blocks + block - 1
    start = tl.load(Ends + before, mask=(pair < n_pairs) & (before >= 0), other=0)
    is_earlier = (group[:, None] == other_group[None, :]) & (other[None, :] < pair[:, None])
    tl.store(Positions + pair, start + tl.sum(is_earlier.to(tl.int32), 1), mask=pair < n_pairs)
    # 2. Write the number of pairs of each group.
    if block == 0:
        bin_ = tl.arange(0, GROUPS)
        last = bin_ * n_blocks + n_blocks - 1
        end = tl.load(Ends + last, mask=bin_ < n_groups, other=0)
        begin = tl.load(Ends + last - n_blocks, mask=(bin_ > 0) & (bin_ < n_groups), other=0)
        tl.store(Counts + bin_, (end - begin).to(tl.int64), mask=bin_ < n_groups)


@triton.jit
def _gather_rows(X, Positions, Out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + token * width + column, mask=column < width, other=0.0)
    for choice in tl.static_range(TOP_K):
        position = tl.load(Positions + token * TOP_K + choice).to(tl.int64)
        tl.store(Out + position * width + column, x, mask=column < width)


@triton.jit
def _sum_rows(Rows, Weights, Positions, Out, width, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        position = tl.load(Positions + token * TOP_K + choice).to(tl.int64)
        row = tl.load(Rows + position * width + column, mask=column < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(Weights + token * TOP_K + choice).to(tl.float32)
        total += row
    tl.store(Out + token * width + column, total.to(Out.dtype.element_ty), mask=column < width)


@triton.jit
def _sum_rows_backward(
    Grad, Rows, Weights, Positions, RowsGrad, WeightsGrad, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token, choice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(Positions + token * TOP_K + choice).to(tl.int64)
    weight = tl.load(Weights + token * TOP_K + choice).to(tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        grad = tl.load(Grad + token * width + column, mask=column < width, other=0.0).to(tl.float32)
        row = tl.load(Rows + position * width + column, mask=column < width, other=0.0).to(tl.float32)
        product += grad * row
        row_grad = (grad * weight).to(RowsGrad.dtype.element_ty)
        tl.store(RowsGrad + position * width + column, row_grad, mask=column < width)
    tl.store(WeightsGrad + token * TOP_K + choice, tl.sum(product).to(WeightsGrad.dtype.element_ty))


@triton.jit
def _route(
    P,
    Experts,
    Counts,
    Weights,
    Sums,
    n_tokens,
    n_experts,
    epsilon,
    scale,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    column, choice = tl.arange(0, EXPERTS), tl.arange(0, PADDED_K)
    chosen, probabilities = tl.zeros((EXPERTS,), tl.float32), tl.zeros((EXPERTS,), tl.float32)
    tokens = tl.zeros((ROWS,), tl.float32)
    for start in range(0, TOKENS, ROWS):
        row = tl.program_id(0) * TOKENS + start + tl.arange(0, ROWS)
        inside = row < n_tokens
        # 1. Weigh the chosen experts by their probabilities.
        is_choice = inside[:, None] & (choice < TOP_K)[None, :]
        expert = tl.load(Experts + row[:, None] * TOP_K + choice[None, :], mask=is_choice, other=0)
        weight = tl.load(P + row[:, None] * n_experts + expert, mask=is_choice, other=0.0)
        if NORMALIZE:
            total = tl.sum(weight, 1) + epsilon
            weight = weight / tl.where(inside, total, 1.0)[:, None]
        weight = (weight * scale).to(Weights.dtype.element_ty)
        tl.store(Weights + row[:, None] * TOP_K + choice[None, :], weight, mask=is_choice)
        # 2. Sum choices, probabilities and tokens.
        count = inside.to(tl.float32)
        if HAS_COUNTS:
            count = tl.load(Counts + row, mask=inside, other=0).to(tl.float32)
        is_expert = inside[:, None] & (column < n_experts)[None, :]
        p = tl.load(P + row[:, None] * n_experts + column[None, :], mask=is_expert, other=0.0)
        probabilities += tl.sum(p * count[:, None], 0)
        tokens += count
        for k in tl.static_range(TOP_K):
            expert_k = tl.load(Experts + row * TOP_K + k, mask=inside, other=0)
            chosen += tl.sum(tl.where(expert_k[:, None] == column[None, :], count[:, None], 0.0), 0)
    sums = Sums + tl.program_id(0) * (2 * n_experts + 1)
    tl.store(sums + column, chosen, mask=column < n_experts)
    tl.store(sums + n_experts + column, probabilities, mask=column < n_experts)
    tl.store(sums + 2 * n_experts, tl.sum(tokens))


@triton.jit
def _route_backward(
    Grad,
    SumsGrad,
    P,
    Experts,
    Counts,
    PGrad,
    n_tokens,
    n_experts,
    epsilon,
    scale,
    sums_stride,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    HAS_SUMS_GRAD: tl.constexpr,
):
    column, choice = tl.arange(0, EXPERTS), tl.arange(0, PADDED_K)
    for start in range(0, TOKENS, ROWS):
        row = tl.program_id(0) * TOKENS + start + tl.arange(0, ROWS)
        inside = row < n_tokens
        grad = tl.zeros((ROWS, EXPERTS), tl.float32)
        if HAS_SUMS_GRAD:
            count = inside.to(tl.float32)
            if HAS_COUNTS:
                count = tl.load(Counts + row, mask=inside, other=0).to(tl.float32)
            sums = SumsGrad + tl.program_id(0) * sums_stride + n_experts
            grad += count[:, None] * tl.load(sums + column, mask=column < n_experts, other=0.0)[None, :]
        if HAS_GRAD:
            # With s the sum of the chosen p and epsilon: d p_i = (g_i - sum of g_j p_j / s) / s.
            total, slope = tl.full((ROWS,), 1.0, tl.float32), tl.zeros((ROWS,), tl.float32)
            if NORMALIZE:
                is_choice = inside[:, None] & (choice < TOP_K)[None, :]
                pair = row[:, None] * TOP_K + choice[None, :]
                expert = tl.load(Experts + pair, mask=is_choice, other=0)
                p = tl.load(P + row[:, None] * n_experts + expert, mask=is_choice, other=0.0)
                weights_grad = tl.load(Grad + pair, mask=is_choice, other=0.0).to(tl.float32)
                total = tl.where(inside, tl.sum(p, 1) + epsilon, 1.0)
                slope = tl.sum(weights_grad * p, 1) / total
            for k in tl.static_range(TOP_K):
                expert_k = tl.load(Experts + row * TOP_K + k, mask=inside, other=0)
                grad_k = tl.load(Grad + row * TOP_K + k, mask=inside, other=0.0).to(tl.float32)
                p_grad = (grad_k - slope) / total * scale
                grad += tl.where(expert_k[:, None] == column[None, :], p_grad[:, None], 0.0)
        is_expert = inside[:, None] & (column < n_experts)[None, :]
        tl.store(PGrad + row[:, None] * n_experts + column[None, :], grad, mask=is_expert)


@triton.jit
def _add_bias(X, Bias, Ends, Out, n_groups, width, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bin_ = tl.arange(0, GROUPS)
    dtype: tl.constexpr = Out.dtype.element_ty
    group = tl.sum((tl.load(Ends + bin_, mask=bin_ < n_groups, other=2147483647) <= row).to(tl.int32), 0).to(tl.int64)
    bias = tl.load(Bias + group * width + column, mask=column < width, other=0.0).to(dtype).to(tl.float32)
    x = tl.load(X + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(Out + row * width + column, (x + bias).to(dtype), mask=column < width)


@triton.jit
def _sum_groups(Grad, Ends, BiasGrad, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    group, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, stop = tl.load(Ends + group - 1, mask=group > 0, other=0), tl.load(Ends + group)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        is_cell = (row < stop)[:, None] & (column < width)[None, :]
        cell = row[:, None].to(tl.int64) * width + column[None, :]
        total += tl.load(Grad + cell, mask=is_cell, other=0.0).to(tl.float32)
    bias_grad = tl.sum(total, 0).to(BiasGrad.dtype.element_ty)
    tl.store(BiasGrad + group.to(tl.int64) * width + column, bias_grad, mask=column < width)


@torch.library.custom_op("archon::group_rows", mutates_args=())
def group_rows(groups: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Sort pairs of tokens and choices by group, stably, by counting.

    Args:
        groups: int64 [T, k], the group of each pair, below `n_groups`.
        n_groups: number of groups G.

    Returns:
        The position int32 [T, k] of each pair in the sorted order, and the number of pairs of each group, int64 [G].
    """
    groups, n_pairs = groups.contiguous(), groups.numel()
    n_blocks, padded = max(1, triton.cdiv(n_pairs, _PAIRS)), triton.next_power_of_2(n_groups + 1)
    counts = torch.empty(n_groups * n_blocks, dtype=torch.int32, device=groups.device)
    _count_groups[(n_blocks,)](groups, counts, n_pairs, n_groups, PAIRS=_PAIRS, GROUPS=padded, num_warps=4)
    # A running sum over groups, and over the blocks of each: the end of each group in each block.
    ends = counts.cumsum(0, dtype=torch.int32)
    positions = torch.empty(groups.shape, dtype=torch.int32, device=groups.device)
    totals = torch.empty(n_groups, dtype=torch.int64, device=groups.device)
    _place_pairs[(n_blocks,)](
        groups, ends, positions, totals, n_pairs, n_groups, n_blocks, PAIRS=_PAIRS, GROUPS=padded, num_warps=4
    )
    return positions, totals


@group_rows.register_fake
def _(groups: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    return groups.new_empty(groups.shape, dtype=torch.int32), groups.new_empty(n_groups, dtype=torch.int64)


def _block(width: int) -> int:
    return min(1024, triton.next_power_of_2(width))


@torch.library.custom_op("archon::gather_rows", mutates_args=())
def gather_rows(x: Tensor, positions: Tensor) -> Tensor:
    """Return rows [T k, dim], with row t of x [T, dim] at each of positions[t], int32 [T, k]. Differentiable in x."""
    x, (n_tokens, top_k), width = x.contiguous(), positions.shape, x.shape[1]
    out, block = x.new_empty(n_tokens * top_k, width), _block(width)
    _gather_rows[n_tokens, triton.cdiv(width, block)](x, positions, out, width, TOP_K=top_k, BLOCK=block, num_warps=4)
    return out


@gather_rows.register_fake
def _(x: Tensor, positions: Tensor) -> Tensor:
    return x.new_empty(positions.numel(), x.shape[1])


@torch.library.custom_op("archon::sum_rows", mutates_args=())
def sum_rows(rows: Tensor, weights: Tensor | None, positions: Tensor) -> Tensor:
    """Return [T, dim], the sum over k of weights[t, k] times the row of rows [N, dim] at positions[t, k].

    Differentiable in rows and weights if there are weights.

    Args:
        rows: [T k, dim].
        weights: [T, k]; None for 1.
        positions: int32 [T, k], as `group_rows` returns them.
    """
    rows, (n_tokens, top_k), width = rows.contiguous(), positions.shape, rows.shape[1]
    out, block = rows.new_empty(n_tokens, width), _block(width)
    _sum_rows[n_tokens, triton.cdiv(width, block)](
        rows,
        rows if weights is None else weights.contiguous(),
        positions,
        out,
        width,
        TOP_K=top_k,
        WEIGHTED=weights is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


@sum_rows.register_fake
def _(rows: Tensor, weights: Tensor | None, positions: Tensor) -> Tensor:
    return rows.new_empty(positions.shape[0], rows.shape[1])


@torch.library.custom_op("archon::sum_rows_backward", mutates_args=())
def sum_rows_backward(grad: Tensor, rows: Tensor, weights: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights of `sum_rows`, for grad [T, dim]."""
    grad, rows, weights = (x.contiguous() for x in (grad, rows, weights))
    rows_grad, weights_grad = torch.empty_like(rows), torch.empty_like(weights)
    width = rows.shape[1]
    _sum_rows_backward[tuple(positions.shape)](
        grad,
        rows,
        weights,
        positions,
        rows_grad,
        weights_grad,
        width,
        TOP_K=positions.shape[1],
        BLOCK=_block(width),
        num_warps=4,
    )
    return rows_grad, weights_grad


@sum_rows_backward.register_fake
def _(grad: Tensor, rows: Tensor, weights: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _router_blocks(n_tokens: int) -> int:
    # At least 2 blocks: torch.compile would compile again for the size 1.
    return (n_tokens + _TOKENS - 1) // _TOKENS + 1


def _router_sizes(p: Tensor, experts: Tensor) -> dict[str, int]:
    padded = triton.next_power_of_2(p.shape[1])
    return {
        "TOP_K": experts.shape[1],
        "PADDED_K": triton.next_power_of_2(experts.shape[1]),
        "EXPERTS": padded,
        "TOKENS": _TOKENS,
        "ROWS": max(1, min(_TOKENS, _TILE // padded)),
        "num_warps": 4,
    }


@torch.library.custom_op("archon::route", mutates_args=())
def route(
    p: Tensor,
    experts: Tensor,
    token_counts: Tensor | None,
    normalize: bool,
    epsilon: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Weigh chosen experts, and sum choices and probabilities of blocks of tokens. Differentiable in p.

    Args:
        p: float32 [T, E], scores.
        experts: int64 [T, k], the chosen experts.
        token_counts: [T], how often a token counts in the sums; None for once.
        normalize: divide the scores of a token's experts by their sum plus `epsilon`.
        epsilon: see `normalize`.
        scale: factor on the weights.
        dtype: of the weights.

    Returns:
        Weights [T, k], and sums float32 [B, 2 E + 1] of each block of tokens: the number of choices of each expert,
        the sum of its scores, and the number of tokens. Only the scores' sums have a gradient.
    """
    p, experts = p.contiguous(), experts.contiguous()
    n_tokens, n_experts = p.shape
    blocks = _router_blocks(n_tokens)
    weights, sums = p.new_empty(experts.shape, dtype=dtype), p.new_empty(blocks, 2 * n_experts + 1)
    _route[(blocks,)](
        p,
        experts,
        p if token_counts is None else token_counts,
        weights,
        sums,
        n_tokens,
        n_experts,
        epsilon,
        scale,
        NORMALIZE=normalize,
        HAS_COUNTS=token_counts is not None,
        **_router_sizes(p, experts),
    )
    return weights, sums


@route.register_fake
def _(p: Tensor, experts: Tensor, token_counts: Any, normalize: Any, epsilon: Any, scale: Any, dtype: Any) -> Any:
    sums = p.new_empty(_router_blocks(p.shape[0]), 2 * p.shape[1] + 1)
    return p.new_empty(experts.shape, dtype=dtype), sums


@torch.library.custom_op("archon::route_backward", mutates_args=())
def route_backward(
    grad: Tensor | None,
    sums_grad: Tensor | None,
    p: Tensor,
    experts: Tensor,
    token_counts: Tensor | None,
    normalize: bool,
    epsilon: float,
    scale: float,
) -> Tensor:
    """Return the gradient [T, E] of p of `route`; a gradient of its results that is None is 0."""
    p, experts = p.contiguous(), experts.contiguous()
    if sums_grad is not None and sums_grad.stride(1) != 1:
        sums_grad = sums_grad.contiguous()
    n_tokens, n_experts = p.shape
    out = torch.empty_like(p)
    _route_backward[(triton.cdiv(n_tokens, _TOKENS),)](
        p if grad is None else grad.contiguous(),
        p if sums_grad is None else sums_grad,
        p,
        experts,
        p if token_counts is None else token_counts,
        out,
        n_tokens,
        n_experts,
        epsilon,
        scale,
        0 if sums_grad is None else sums_grad.stride(0),
        NORMALIZE=normalize,
        HAS_COUNTS=token_counts is not None,
        HAS_GRAD=grad is not None,
        HAS_SUMS_GRAD=sums_grad is not None,
        **_router_sizes(p, experts),
    )
    return out


@route_backward.register_fake
def _(grad: Any, sums_grad: Any, p: Tensor, *args: Any) -> Tensor:
    return p.new_empty(p.shape)


@torch.library.custom_op("archon::add_bias", mutates_args=())
def add_bias(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Add to each row of x [N, out] the bias [E, out] of its group, rounded to the dtype of x. Differentiable.

    Args:
        x: rows sorted by group.
        bias: of each group.
        ends: int32 [E], the end of each group of rows.
    """
    x, bias, (n_rows, width) = x.contiguous(), bias.contiguous(), x.shape
    out, block = torch.empty_like(x), _block(width)
    padded = triton.next_power_of_2(len(ends))
    _add_bias[n_rows, triton.cdiv(width, block)](
        x, bias, ends, out, len(ends), width, GROUPS=padded, BLOCK=block, num_warps=4
    )
    return out


@add_bias.register_fake
def _(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("archon::add_bias_backward", mutates_args=())
def add_bias_backward(grad: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient [E, out] of the bias of `add_bias`, for grad [N, out]."""
    grad, out, width = grad.contiguous(), bias.new_empty(bias.shape), bias.shape[1]
    _sum_groups[len(ends), triton.cdiv(width, 64)](grad, ends, out, width, ROWS=32, BLOCK=64, num_warps=4)
    return out


@add_bias_backward.register_fake
def _(grad: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    return bias.new_empty(bias.shape)


def _save_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _add_bias_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    return grad, add_bias_backward(grad, *ctx.saved_tensors) if ctx.needs_input_grad[1] else None, None


def _save_positions(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gather_rows_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return sum_rows(grad, None, *ctx.saved_tensors), None


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _sum_rows_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *sum_rows_backward(grad, *ctx.saved_tensors), None


def _save_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:6]
    ctx.set_materialize_grads(False)


def _route_grad(ctx: Any, grad: Tensor | None, sums_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return route_backward(grad, sums_grad, *ctx.saved_tensors, *ctx.options), *[None] * 6


gather_rows.register_autograd(_gather_rows_grad, setup_context=_save_positions)
add_bias.register_autograd(_add_bias_grad, setup_context=_save_bias)
sum_rows.register_autograd(_sum_rows_grad, setup_context=_save_inputs)
route.register_autograd(_route_grad, setup_context=_save_route)
