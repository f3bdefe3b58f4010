"""Kernels around attention over shared prefixes: select the tokens of contexts, merge two results, add two gradients.

Sums are in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Features that a program copies at a time, and elements of a tile of heads times features.
_BLOCK, _TILE = 1024, 2048


@triton.jit
def _copy(Source, Target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(Target + column, tl.load(Source + column, mask=column < WIDTH, other=0.0), mask=column < WIDTH)


@triton.jit
def _select(
    Q,
    K,
    V,
    Grad,
    Out,
    Lse,
    QueryRows,
    KeyRows,
    SelectedQ,
    SelectedK,
    SelectedV,
    SelectedGrad,
    SelectedOut,
    SelectedLse,
    n_queries,
    n_tokens,
    q_stride,
    k_stride,
    v_stride,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HAS_RESULTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if index < n_queries:
        row = tl.load(QueryRows + index)
        _copy(Q + row * q_stride, SelectedQ + index * Q_WIDTH, Q_WIDTH, BLOCK)
        if HAS_RESULTS:
            _copy(Grad + row * OUT_WIDTH, SelectedGrad + index * OUT_WIDTH, OUT_WIDTH, BLOCK)
            _copy(Out + row * OUT_WIDTH, SelectedOut + index * OUT_WIDTH, OUT_WIDTH, BLOCK)
            head = tl.arange(0, PADDED_HEADS)
            lse = tl.load(Lse + head * n_tokens + row, mask=head < HEADS, other=0.0)
            tl.store(SelectedLse + head * n_queries + index, lse, mask=head < HEADS)
    else:
        index -= n_queries
        row = tl.load(KeyRows + index)
        _copy(K + row * k_stride, SelectedK + index * K_WIDTH, K_WIDTH, BLOCK)
        _copy(V + row * v_stride, SelectedV + index * V_WIDTH, V_WIDTH, BLOCK)


@triton.jit
def _merge(
    RunOut,
    RunLse,
    ContextOut,
    ContextLse,
    Slots,
    Sinks,
    Out,
    Lse,
    n_tokens,
    n_queries,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    FEATURES_BLOCK: tl.constexpr,
):
    token, slot = tl.program_id(0).to(tl.int64), tl.load(Slots + tl.program_id(0)).to(tl.int64)
    head, feature = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK), tl.arange(0, FEATURES_BLOCK)
    # 1. Add the log-sum-exps of the run, of the context if there is one, and of the sink.
    is_head, in_context = head < HEADS, (head < HEADS) & (slot >= 0)
    run_lse = tl.load(RunLse + head * n_tokens + token, mask=is_head, other=0.0)
    context_lse = tl.load(ContextLse + head * n_queries + slot, mask=in_context, other=float("-inf"))
    sink = tl.full((HEADS_BLOCK,), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(Sinks + head, mask=is_head, other=0.0).to(tl.float32)
    top = tl.maximum(run_lse, tl.maximum(context_lse, sink))
    lse = top + tl.log(tl.exp(run_lse - top) + tl.exp(context_lse - top) + tl.exp(sink - top))
    tl.store(Lse + head * n_tokens + token, lse, mask=is_head)
    # 2. Weigh both results.
    cell, is_cell = head[:, None] * FEATURES + feature[None, :], is_head[:, None] & (feature < FEATURES)[None, :]
    row, context_row = RunOut + token * HEADS * FEATURES, ContextOut + slot * HEADS * FEATURES
    run = tl.load(row + cell, mask=is_cell, other=0.0).to(tl.float32)
    context = tl.load(context_row + cell, mask=is_cell & (slot >= 0), other=0.0).to(tl.float32)
    out = run * tl.exp(run_lse - lse)[:, None] + context * tl.exp(context_lse - lse)[:, None]
    tl.store(Out + token * HEADS * FEATURES + cell, out.to(Out.dtype.element_ty), mask=is_cell)


@triton.jit
def _sum_row(Sum, Terms, Starts, Positions, WIDTH: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of a token's terms, or add it to what is there."""
    token = tl.program_id(0)
    start, stop = tl.load(Starts + token), tl.load(Starts + token + 1)
    row = Sum + token.to(tl.int64) * WIDTH
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        if ADDS:
            total += tl.load(row + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        for index in range(start, stop):
            position = tl.load(Positions + index).to(tl.int64)
            total += tl.load(Terms + position * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        tl.store(row + column, total.to(Sum.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _sum_keys(
    Dk,
    Dv,
    SelectedDk,
    SelectedDv,
    Starts,
    Positions,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _sum_row(Dk, SelectedDk, Starts, Positions, K_WIDTH, False, BLOCK)
    _sum_row(Dv, SelectedDv, Starts, Positions, V_WIDTH, False, BLOCK)


@triton.jit
def _add_grads(
    Dq,
    Dk,
    Dv,
    ContextDq,
    ContextDk,
    ContextDv,
    Slots,
    Starts,
    Positions,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot, row = tl.load(Slots + tl.program_id(0)).to(tl.int64), Dq + tl.program_id(0).to(tl.int64) * Q_WIDTH
    if slot >= 0:
        for first in range(0, Q_WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            total = tl.load(row + column, mask=column < Q_WIDTH, other=0.0).to(tl.float32)
            total += tl.load(ContextDq + slot * Q_WIDTH + column, mask=column < Q_WIDTH, other=0.0).to(tl.float32)
            tl.store(row + column, total.to(Dq.dtype.element_ty), mask=column < Q_WIDTH)
    if tl.load(Starts + tl.program_id(0) + 1) > tl.load(Starts + tl.program_id(0)):
        _sum_row(Dk, ContextDk, Starts, Positions, K_WIDTH, True, BLOCK)
        _sum_row(Dv, ContextDv, Starts, Positions, V_WIDTH, True, BLOCK)


def _rows(x: Tensor) -> Tensor:
    """Return x [T, H, D] with dense rows."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@torch.library.custom_op("archon::select_context", mutates_args=())
def select_context(
    q: Tensor, k: Tensor, v: Tensor, query_rows: Tensor, key_rows: Tensor, results: list[Tensor]
) -> list[Tensor]:
    """Select the queries and keys of contexts.

    Args:
        q: [T, H, D].
        k: [T, G, D].
        v: [T, G, E].
        query_rows: int64 [N], tokens of the queries.
        key_rows: int64 [M], tokens of the keys.
        results: the gradient and the output of attention [T, H, E] and its log-sum-exp float32 [H, T]; or empty.

    Returns:
        q [N, H, D], k [M, G, D] and v [M, G, E], and each of the `results` for the N queries.
    """
    q, k, v = map(_rows, (q, k, v))
    results = [x.contiguous() for x in results]
    n_queries, n_keys, heads = len(query_rows), len(key_rows), q.shape[1]
    selected = [q.new_empty(n_queries, *q.shape[1:])]
    selected += [x.new_empty(n_keys, *x.shape[1:]) for x in (k, v)]
    selected += [x.new_empty(n_queries, *x.shape[1:]) for x in results[:2]]
    selected += [x.new_empty(heads, n_queries) for x in results[2:]]
    widths = [x[0].numel() for x in (q, k, v, *results[:1])]
    _select[(n_queries + n_keys,)](
        q,
        k,
        v,
        *(results or [q] * 3),
        query_rows,
        key_rows,
        *selected,
        *([] if results else [q] * 3),
        n_queries,
        len(q),
        *(x.stride(0) for x in (q, k, v)),
        Q_WIDTH=widths[0],
        K_WIDTH=widths[1],
        V_WIDTH=widths[2],
        OUT_WIDTH=widths[-1],
        HEADS=heads,
        PADDED_HEADS=triton.next_power_of_2(heads),
        HAS_RESULTS=bool(results),
        BLOCK=min(_BLOCK, triton.next_power_of_2(min(widths))),
        num_warps=4,
    )
    return selected


@select_context.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, query_rows: Tensor, key_rows: Tensor, results: list[Tensor]) -> list[Tensor]:
    n_queries, n_keys = len(query_rows), len(key_rows)
    keys = [x.new_empty(n_keys, *x.shape[1:]) for x in (k, v)]
    rows = [x.new_empty(n_queries, *x.shape[1:]) for x in results[:2]]
    return [
        q.new_empty(n_queries, *q.shape[1:]), *keys, *rows, *(x.new_empty(len(x), n_queries) for x in results[2:])
    ]  # fmt: skip


@torch.library.custom_op("archon::merge_context", mutates_args=())
def merge_context(
    run_out: Tensor, run_lse: Tensor, context_out: Tensor, context_lse: Tensor, slots: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return attention [T, H, E] and its log-sum-exp [H, T] over runs and their contexts.

    Args:
        run_out: [T, H, E], attention to the run of a token.
        run_lse: float32 [H, T].
        context_out: [N, H, E], attention to a context.
        context_lse: float32 [H, N].
        slots: int32 [T], the index of each token among the N; -1 without a context.
        sinks: [H], or None.
    """
    run_out, run_lse, context_out, context_lse = (x.contiguous() for x in (run_out, run_lse, context_out, context_lse))
    (n_tokens, heads, features), n_queries = run_out.shape, len(context_out)
    out, lse = torch.empty_like(run_out), torch.empty_like(run_lse)
    padded = triton.next_power_of_2(features)
    block = max(1, min(triton.next_power_of_2(heads), _TILE // padded))
    _merge[n_tokens, triton.cdiv(heads, block)](
        run_out,
        run_lse,
        context_out,
        context_lse,
        slots,
        run_lse if sinks is None else sinks,
        out,
        lse,
        n_tokens,
        n_queries,
        HEADS=heads,
        FEATURES=features,
        HAS_SINKS=sinks is not None,
        HEADS_BLOCK=block,
        FEATURES_BLOCK=padded,
        num_warps=4,
    )
    return out, lse


@merge_context.register_fake
def _(run_out: Tensor, run_lse: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return run_out.new_empty(run_out.shape), run_lse.new_empty(run_lse.shape)


@torch.library.custom_op("archon::add_context_grads", mutates_args=("dq", "dk", "dv"))
def add_context_grads(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    context_grads: list[Tensor],
    slots: Tensor,
    key_starts: Tensor,
    key_positions: Tensor,
) -> None:
    """Add the gradients of contexts to `dq`, `dk` and `dv`, the gradients of runs, in place.

    Args:
        dq: [T, H, D], dense.
        dk: [T, G, D], dense.
        dv: [T, G, E], dense.
        context_grads: gradients of the selected q [N, H, D], k [M, G, D] and v [M, G, E].
        slots: int32 [T], see `merge_context`.
        key_starts: int32 [T + 1], where the positions of each token start.
        key_positions: int32 [M], positions of tokens among the M keys, sorted by token.
    """
    widths = [x[0].numel() for x in (dq, dk, dv)]
    _add_grads[(len(dq),)](
        dq,
        dk,
        dv,
        *(x.contiguous() for x in context_grads),
        slots,
        key_starts,
        key_positions,
        Q_WIDTH=widths[0],
        K_WIDTH=widths[1],
        V_WIDTH=widths[2],
        BLOCK=min(_BLOCK, triton.next_power_of_2(min(widths))),
        num_warps=4,
    )


@add_context_grads.register_fake
def _(dq: Tensor, *args: Any) -> None:
    return None


@torch.library.custom_op("archon::select_keys", mutates_args=())
def select_keys(
    k: Tensor, v: Tensor, key_rows: Tensor, key_starts: Tensor, key_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return k [M, G, D] and v [M, G, E] at `key_rows` of k [T, G, D] and v [T, G, E]. Differentiable.

    `key_starts` and `key_positions` are documented in `add_context_grads`.
    """
    _, selected_k, selected_v = select_context(k, k, v, key_rows[:0], key_rows, [])
    return selected_k, selected_v


@select_keys.register_fake
def _(k: Tensor, v: Tensor, key_rows: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return k.new_empty(len(key_rows), *k.shape[1:]), v.new_empty(len(key_rows), *v.shape[1:])


@torch.library.custom_op("archon::sum_keys", mutates_args=())
def sum_keys(dk: Tensor, dv: Tensor, key_starts: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v of `select_keys`, for dk [M, G, D] and dv [M, G, E]."""
    dk, dv = dk.contiguous(), dv.contiguous()
    sums = [x.new_empty(len(key_starts) - 1, *x.shape[1:]) for x in (dk, dv)]
    widths = [x[0].numel() for x in (dk, dv)]
    block = min(_BLOCK, triton.next_power_of_2(min(widths)))
    _sum_keys[(len(sums[0]),)](
        *sums, dk, dv, key_starts, key_positions, K_WIDTH=widths[0], V_WIDTH=widths[1], BLOCK=block, num_warps=4
    )
    return sums[0], sums[1]


@sum_keys.register_fake
def _(dk: Tensor, dv: Tensor, key_starts: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
    n_tokens = len(key_starts) - 1
    return dk.new_empty(n_tokens, *dk.shape[1:]), dv.new_empty(n_tokens, *dv.shape[1:])


def _save_lookups(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[3:])


def _select_keys_grad(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    return *sum_keys(dk, dv, *ctx.saved_tensors), None, None, None


select_keys.register_autograd(_select_keys_grad, setup_context=_save_lookups)
