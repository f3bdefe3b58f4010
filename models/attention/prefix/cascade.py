"""Cascade attention: shared prefixes by kernels that support only packed documents.

A query attends causally to its run of tokens, and to the whole context before the run. A kernel computes each part: one
call for all runs, and one for all contexts. The queries of a context are the queries of all runs after it, so its keys
are read once for all of them (Juravsky et al. 2024, arXiv:2402.05099). With the results o_1, o_2 and log-sum-exps l_1,
l_2 of the two calls, and a sink's score s,

    lse = log(e^l_1 + e^l_2 + e^s)    out = o_1 e^(l_1 - lse) + o_2 e^(l_2 - lse)

Each kernel's backward takes the merged out and lse and returns the gradients of its keys: see
`archon.models.attention.sinks`. A window moves with its query, so layers with a window make one call for all runs, with
the end of the context prepended to the keys of each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from archon.models.attention.packed.documents import check_lengths, cu_seqlens_from_lengths
from archon.models.attention.sinks import KernelWithLse, add_sinks, sinks_grad
from archon.models.attention.spans import ranges
from archon.models.attention.spec import AttentionSpec
from archon.parallel.transfer import to_device_async

Spans = Sequence[tuple[int, int]]
"""(first token, length) of consecutive tokens."""


class Bounds(NamedTuple):
    """Boundaries int32 [B + 1] of documents, and the longest length."""

    cu_seqlens: Tensor
    longest: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> Bounds:
        """Return the boundaries of documents of these lengths, on `device`."""
        return cls(cu_seqlens_from_lengths(lengths, device), max(lengths))


@dataclass(frozen=True)
class Part:
    """Documents with queries and keys selected from T tokens; a token is a query of at most one document.

    Attributes:
        queries: boundaries of the documents' queries.
        keys: boundaries of the documents' keys.
        query_rows: int64 [N], tokens of the queries.
        key_rows: int64 [M], tokens of the keys.
        query_slots: int32 [T], the index of each token among the N queries, or -1.
        key_starts: int32 [T + 1], where the `key_positions` of each token start.
        key_positions: int32 [M], indices of the M keys, sorted by token.
    """

    queries: Bounds
    keys: Bounds
    query_rows: Tensor
    key_rows: Tensor
    query_slots: Tensor
    key_starts: Tensor
    key_positions: Tensor

    @classmethod
    def from_spans(cls, queries: Sequence[Spans], keys: Sequence[Spans], tokens: int, device: torch.device) -> Part:
        """Return the documents of these spans of `tokens` tokens."""
        bounds, rows = list[Bounds](), list[Tensor]()
        for side in (queries, keys):
            bounds.append(Bounds.from_lengths([sum(length for _, length in spans) for spans in side], device))
            firsts, lengths = zip(*(span for document in side for span in document), strict=True)
            rows.append(torch.from_numpy(ranges(firsts, lengths)))
        slots = torch.full((tokens,), -1).index_copy_(0, rows[0], torch.arange(len(rows[0])))
        starts = F.pad(rows[1].bincount(minlength=tokens).cumsum(0), (1, 0))
        # One copy to the device for all.
        lookups = torch.cat((slots, starts, rows[1].argsort(stable=True))).int()
        on_device = to_device_async(lookups, device).split([tokens, tokens + 1, len(rows[1])])
        return cls(bounds[0], bounds[1], *(to_device_async(x, device) for x in rows), *on_device)


class Cascade:
    """Runs of tokens, each after a context of other runs, also in trees; each part is built once.

    `parents` is documented in `archon.models.attention.prefix.plan.SharedPrefixes`.
    """

    def __init__(self, parents: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self.device, self.tokens = device, sum(length for _, length, _ in parents)
        self._spans, self._paths = [(first, length) for first, length, _ in parents], list[tuple[int, ...]]()
        for _, _, parent in parents:
            self._paths.append(() if parent < 0 else (*self._paths[parent], parent))
        self._expanded: dict[int, Part] = {}

    @cached_property
    def run_bounds(self) -> Bounds:
        """The runs as documents."""
        return Bounds.from_lengths([length for _, length in self._spans], self.device)

    @cached_property
    def contexts(self) -> Part | None:
        """Contexts, each with the queries of all runs after it; None without contexts."""
        after: dict[tuple[int, ...], list[int]] = {}
        for run, path in enumerate(self._paths):
            if path:
                after.setdefault(path, []).append(run)
        if not after:
            return None
        queries, keys = ([[self._spans[run] for run in runs] for runs in some] for some in (after.values(), after))
        return Part.from_spans(queries, keys, self.tokens, self.device)

    def expand_window(self, window: int) -> Part:
        """Return each run with its keys and the end of its context, as far as a window reaches."""
        if window not in self._expanded:
            keys = [[*self._tail(path, window - 1), run] for path, run in zip(self._paths, self._spans, strict=True)]
            queries = [[span] for span in self._spans]
            self._expanded[window] = Part.from_spans(queries, keys, self.tokens, self.device)
        return self._expanded[window]

    def _tail(self, path: tuple[int, ...], tokens: int) -> list[tuple[int, int]]:
        """Return the spans of the last `tokens` tokens of a context, or all if it has fewer."""
        spans = list[tuple[int, int]]()
        for first, length in (self._spans[run] for run in reversed(path)):
            if visible := min(length, tokens):
                spans.append((first + length - visible, visible))
            tokens -= visible
        return spans[::-1]


MakeKernel = Callable[[Bounds, Bounds, AttentionSpec], KernelWithLse]
"""(queries, keys, spec) -> a kernel that aligns the last query of a document with its last key."""
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""(q, k, v, kernel) -> differentiable attention by a kernel of the backend, with the sinks of its spec."""


@torch.compiler.disable
def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cascade: Cascade,
    spec: AttentionSpec,
    attend: Attend,
    make_kernel: MakeKernel,
) -> Tensor:
    """Return causal attention of the computed tokens [U, H, D], for q [U, H, D], k and v [U, G, D]."""
    check_lengths(cascade.tokens, len(q))
    run_bounds = cascade.run_bounds
    if cascade.contexts is None:
        return attend(q, k, v, make_kernel(run_bounds, run_bounds, spec))
    if spec.window is not None:
        part = cascade.expand_window(spec.window)
        return attend(q, *_select_keys(part, k, v), make_kernel(part.queries, part.keys, spec))
    plain = replace(spec, sinks=None)
    # A window of all keys avoids cuDNN, which PyTorch uses without a window; its log-sum-exps have other shapes.
    longest = cascade.contexts.keys.longest
    whole = replace(plain, causal=False, window=longest + 1)
    kernels = (
        make_kernel(run_bounds, run_bounds, plain),
        make_kernel(cascade.contexts.queries, cascade.contexts.keys, whole),
    )
    return _Merged.apply(q, k, v, spec.sinks, cascade.contexts, *kernels)


class _Merged(torch.autograd.Function):
    """Attention to each token's run and to its context, by one kernel each."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        part: Part,
        run_kernel: KernelWithLse,
        context_kernel: KernelWithLse,
    ) -> Tensor:
        run_out, run_lse = run_kernel.forward(q, k, v)
        context_out, context_lse = context_kernel.forward(*_select(part, q, k, v))
        for lse, tokens in ((run_lse, len(q)), (context_lse, len(part.query_rows))):
            assert lse.shape == (q.shape[1], tokens), f"log-sum-exp of shape {tuple(lse.shape)}, expected [H, T]"
        merged, lse = _merge(part, run_out, run_lse, context_out, context_lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, merged, lse)
        ctx.constants = part, run_kernel, context_kernel
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        part, run_kernel, context_kernel = ctx.constants
        grad = grad.contiguous()
        grads = run_kernel.backward(grad, q, k, v, out, lse)
        context_q, context_k, context_v, *results = _select(part, q, k, v, grad, out, lse)
        context_grads = context_kernel.backward(results[0], context_q, context_k, context_v, *results[1:])
        sums = _add_grads(part, grads, context_grads, lse.dtype)
        dsinks = None if sinks is None else sinks_grad(grad, out, lse, sinks)
        return *sums, dsinks, None, None, None


def _has_kernels(x: Tensor) -> bool:
    """Return whether kernels of `archon.models.cuda.prefixes` compute with the dtype of x on its device."""
    return x.is_cuda and x.dtype.itemsize <= 4


def _select_keys(part: Part, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a part; differentiable."""
    if _has_kernels(k):
        from archon.models.cuda.prefixes import select_keys

        selected: tuple[Tensor, Tensor] = select_keys(k, v, part.key_rows, part.key_starts, part.key_positions)
        return selected
    return k.index_select(0, part.key_rows), v.index_select(0, part.key_rows)


def _select(part: Part, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> list[Tensor]:
    """Return the queries, keys and values of a part, and grad and out [N, H, E] and lse [H, N], if there are any."""
    queries, keys = part.query_rows, part.key_rows
    if _has_kernels(q):
        from archon.models.cuda.prefixes import select_context

        selected: list[Tensor] = select_context(q, k, v, queries, keys, list(results))
        return selected
    inputs = q.index_select(0, queries), k.index_select(0, keys), v.index_select(0, keys)
    return [*inputs, *(x.index_select(dim, queries) for x, dim in zip(results, (0, 0, 1), strict=False))]


def _merge(
    part: Part, run_out: Tensor, run_lse: Tensor, context_out: Tensor, context_lse: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return attention [T, H, E] and its log-sum-exp [H, T] over runs and contexts, from both over each."""
    if _has_kernels(run_out):
        from archon.models.cuda.prefixes import merge_context

        merged: tuple[Tensor, Tensor] = merge_context(
            run_out, run_lse, context_out, context_lse, part.query_slots, sinks
        )
        return merged
    queries = part.query_rows
    lse = run_lse.index_copy(1, queries, torch.logaddexp(run_lse.index_select(1, queries), context_lse))
    if sinks is not None:
        lse = add_sinks(lse, sinks)
    out = run_out * _merge_weight(run_lse, lse)
    out.index_add_(0, queries, context_out * _merge_weight(context_lse, lse.index_select(1, queries)))
    return out.to(run_out.dtype), lse


def _merge_weight(lse: Tensor, merged: Tensor) -> Tensor:
    """Return the weight [T, H, 1] of a partial result with log-sum-exp lse [H, T]."""
    return (lse - merged).exp().t().unsqueeze(-1)


def _add_grads(
    part: Part, grads: Sequence[Tensor], context_grads: Sequence[Tensor], wide: torch.dtype
) -> Sequence[Tensor]:
    """Return the gradients of q, k and v: the sums over runs and contexts, added in `wide`."""
    if _has_kernels(grads[0]):
        from archon.models.cuda.prefixes import add_context_grads

        sums = [x.contiguous() for x in grads]
        add_context_grads(*sums, [*context_grads], part.query_slots, part.key_starts, part.key_positions)
        return sums
    # Keys and queries in several parts sum their gradients.
    return [
        run_grad.to(wide).index_add_(0, rows, context_grad.to(wide)).to(run_grad.dtype)
        for run_grad, context_grad, rows in zip(
            grads, context_grads, (part.query_rows, part.key_rows, part.key_rows), strict=True
        )
    ]
