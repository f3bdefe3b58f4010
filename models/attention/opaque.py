"""SDPA of packed documents as one operator that torch.compile does not look into.

Traced, the loop over documents would be unrolled for their lengths, and every ragged batch would be compiled anew. The
backward attends once more to find what it needs; eager mode goes to `sdpa_attention` directly and does not pay for
that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.attention.sdpa import sdpa_attention


def opaque_sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, window: int | None, scale: float) -> Tensor:
    """As `sdpa_attention`, with the documents' lengths in a CPU tensor, int64 [B]."""
    return _forward(q, k, v, lengths, 0 if window is None else window, scale)


@torch.library.custom_op("archon::packed_sdpa", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
    out = sdpa_attention(q, k, v, tuple(lengths.tolist()), window=window or None, scale=scale)
    return out.contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
    return q.new_empty(q.shape)


# Defined by schema and not by `custom_op`, whose kernels run with autograd switched off, and this one is autograd's
# work.
torch.library.define(
    "archon::packed_sdpa_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor lengths, int window, float scale) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("archon::packed_sdpa_backward", ("cpu", "cuda"))
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = sdpa_attention(q, k, v, tuple(lengths.tolist()), window=window or None, scale=scale)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@torch.library.register_fake("archon::packed_sdpa_backward")
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, lengths, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, lengths)


def _differentiate(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    q, k, v, lengths = ctx.saved_tensors
    return *torch.ops.archon.packed_sdpa_backward(grad, q, k, v, lengths, ctx.window, ctx.scale), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
