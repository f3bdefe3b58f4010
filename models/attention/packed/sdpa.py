"""Attention document by document, without a mask over the pack: any device and floating dtype.

Adjacent documents of equal length form one batch (see `archon.models.attention.packed.blockwise.batched_attention`);
adjacent short ones take one call of a C kernel.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend
from archon.models.attention.packed.blockwise import batched_attention, blockwise_attention
from archon.models.attention.packed.documents import GatheredKeys, PackedDocuments, check_lengths
from archon.models.attention.prefix.plan import SharedPrefixes, prefix_attention
from archon.models.attention.spec import AttentionSpec
from archon.models.cpu import tree_kernel

SHORT = 24
"""Maximum tokens of documents for `archon.models.cpu.tree_kernel` on a CPU, which takes a third to nine tenths of the
time of one call per length. At 32 tokens it takes longer in some shapes."""


class ScaledDotProductAttention(AttentionBackend):
    """`scaled_dot_product_attention`, or blocks of plain matmuls for sizes at which they are faster."""

    name = "sdpa"
    saved_ops = frozenset(
        {
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "archon::packed_sdpa",
        }
    )
    features = frozenset({"window", "soft_cap", "sinks", "bidirectional"})
    prefers_equal_lengths = True

    def prepare_packed(self, documents: PackedDocuments) -> None:
        """See `AttentionBackend.prepare_packed`."""
        _ = documents.length_tensor

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_packed`."""
        if torch.compiler.is_compiling() and spec.causal:
            options = spec.window or 0, spec.scale, spec.soft_cap or 0.0
            return _packed_operator(q, k, v, spec.sinks, documents.length_tensor, *options)
        if not tree_kernel.can_use(q, k, v, SHORT, spec):
            return sdpa_attention(q, k, v, documents.lengths, spec)
        check_lengths(sum(documents.lengths), q.shape[0])
        runs = documents.runs(SHORT)
        sizes = [sum(lengths) for lengths, _ in runs]
        parts = zip(runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        outs = [
            sdpa_attention(q, k, v, lengths, spec) if routes is None else tree_kernel.attend(q, k, v, routes, spec)
            for (lengths, routes), q, k, v in parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attend_gathered(self, q: Tensor, kv: Tensor, keys: GatheredKeys, spec: AttentionSpec) -> Tensor:
        """Attend by chunk; adjacent chunks of equal shape form one batch."""
        spec = spec.with_wide_sinks(q.dtype)
        pack, outs, row = keys.in_pack_order(kv), list[Tensor](), 0
        chunks = zip(keys.query_lengths, keys.key_spans, strict=True)
        for (length, count), batch in groupby(chunks, key=lambda chunk: (chunk[0], chunk[1][1])):
            firsts = [first for _, (first, _) in batch]
            rows = q[row : row + length * len(firsts)].unflatten(0, (len(firsts), length))
            k, v = (torch.stack([x[first : first + count] for first in firsts]) for x in pack)
            outs.append(blockwise_attention(rows, k, v, spec).flatten(0, 1))
            row += length * len(firsts)
        return torch.cat(outs)

    def attend_prefixed(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, spec: AttentionSpec) -> Tensor:
        """See `AttentionBackend.attend_prefixed`."""
        return prefix_attention(q, k, v, shared, spec)


@torch.compiler.disable
def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], spec: AttentionSpec) -> Tensor:
    """Return attention [T, H, D] of documents with these lengths: q [T, H, D], k and v [T, G, D].

    Eager under `torch.compile`, which would otherwise recompile for each set of lengths.
    """
    check_lengths(sum(lengths), q.shape[0])
    runs = [(length, len(list(same))) for length, same in groupby(length for length in lengths if length)]
    sizes = [length * count for length, count in runs]
    spec, outs = spec.with_wide_sinks(q.dtype), []
    for (length, count), *qkv in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        q_BSHD, k_BSGD, v_BSGD = (x.unflatten(0, (count, length)) for x in qkv)
        outs.append(batched_attention(q_BSHD, k_BSGD, v_BSGD, spec).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


# Compiled code calls one operator, which torch.compile does not trace: it would unroll the loop over documents and
# recompile for each set of lengths. The lengths are a CPU tensor, int64 [B]; a window or soft cap of 0 means none. The
# backward runs the forward again for what it needs; eager mode does not.


@torch.library.custom_op("archon::packed_sdpa", mutates_args=())
def _packed_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: Tensor, window: int, scale: float, soft_cap: float
) -> Tensor:
    spec = AttentionSpec(scale, window or None, soft_cap or None, sinks)
    return sdpa_attention(q, k, v, tuple(lengths.tolist()), spec).contiguous()


@_packed_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


# Defined by schema, because the kernels of `custom_op` run with autograd disabled, and this one uses it.
torch.library.define(
    "archon::packed_sdpa_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor lengths, int window, float scale, "
    "float soft_cap) -> Tensor[]",
)


@torch.library.impl("archon::packed_sdpa_backward", ("cpu", "cuda"))
def _packed_backward(grad: Tensor, *inputs: Any) -> list[Tensor]:
    *tensors, lengths, window, scale, soft_cap = inputs
    leaves = [x.detach().requires_grad_() for x in tensors if x is not None]
    with torch.enable_grad():
        spec = AttentionSpec(scale, window or None, soft_cap or None, *leaves[3:])
        out = sdpa_attention(*leaves[:3], tuple(lengths.tolist()), spec)
    return [x.contiguous() for x in torch.autograd.grad(out, leaves, grad)]


@torch.library.register_fake("archon::packed_sdpa_backward")
def _(grad: Tensor, *inputs: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs[:4] if x is not None]


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.window, ctx.scale, ctx.soft_cap = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    inputs = *ctx.saved_tensors, ctx.window, ctx.scale, ctx.soft_cap
    grads = torch.ops.archon.packed_sdpa_backward(grad, *inputs)
    return *grads, *[None] * (len(inputs) - len(grads))


_packed_operator.register_autograd(_backward, setup_context=_setup_context)
