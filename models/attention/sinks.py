"""Attention sinks around a kernel without sinks, exact through its log-sum-exp and its backward.

With a sink s per head (Xiao et al. 2023, arXiv:2309.17453) and the kernel's out and lse,

    lse' = log(e^lse + e^s)    out' = out e^(lse - lse')

FlashAttention's backward (Dao et al. 2022, arXiv:2205.14135, algorithm 4) recomputes probabilities as e^(score - lse)
and subtracts the row sum of grad * out from the gradient of each. Given out' and lse' it therefore computes the
gradients of attention with sinks; the gradient of s is minus e^(s - lse') times the row sum. Treating lse as a constant
would make the gradients wrong by tens of percent.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class KernelWithLse(abc.ABC):
    """An attention kernel and its backward, with everything but queries, keys and values fixed."""

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention [T, H, D], and the log-sum-exp [H, T] of the scores in at least float32."""

    @abc.abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, from the results of `forward`."""


def add_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """Add sinks [H] to log-sum-exps [H, T]."""
    return torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention [T, H, D] and its log-sum-exp [H, T] with sinks [H], from both without sinks."""
    assert lse.shape == (out.shape[1], out.shape[0]), f"log-sum-exp of shape {tuple(lse.shape)}, expected [H, T]"
    with_sinks = add_sinks(lse, sinks)
    return (out * (lse - with_sinks).exp().t().unsqueeze(-1)).to(out.dtype), with_sinks


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient [H] of sinks, from grad and out [T, H, D] and lse [H, T] with the sinks."""
    row_sums = (grad.to(lse.dtype) * out).sum(-1).t()
    dsinks = -((sinks.to(lse.dtype).unsqueeze(1) - lse).exp() * row_sums).sum(1)
    return dsinks.to(sinks.dtype)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: KernelWithLse) -> Tensor:
        out, lse = kernel.forward(q, k, v)
        out, with_sinks = merge_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, with_sinks)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, lse)
        return dq, dk, dv, sinks_grad(grad, out, lse, sinks), None


@torch.compiler.disable
def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: KernelWithLse) -> Tensor:
    """Return attention [T, H, D] with sinks [H], for q [T, H, D] and the kernel's k and v."""
    return _WithSinks.apply(q, k, v, sinks, kernel)
