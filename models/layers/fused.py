"""Elementwise layers as custom autograd functions: fewer memory passes and fewer saved tensors in eager mode.

Each has a plain version of ordinary operations, which defines it: `torch.compile` fuses the plain version by itself,
and tests compare the two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns weight * x / sqrt(mean(x^2) + eps).

    Statistics are in at least float32; the normalized x is rounded to its dtype before it is multiplied by the weight.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [T, H, d] with its pairs (x_i, x_{i + d/2}) rotated by the angles of cos and sin [T, 1, d/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    return F.silu(gate) * up


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # The 2-norm reads x once and does not write its square to memory.
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        out = wide * rstd
        return out.mul_(weight) if out.dtype == weight.dtype else out.to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        wide, wide_weight, wide_grad = (t.to(rstd.dtype) for t in (x, weight, grad))
        dim = x.shape[-1]
        product = wide_grad * wide
        # With r = (mean x^2 + eps)^(-1/2) and y = x r w: dx = g w r - x r^3 <g w, x> / dim, and dw = sum of g x r.
        slope = (product @ wide_weight).unsqueeze(-1).mul_(rstd).mul_(rstd).mul_(rstd).div_(dim)
        weight_grad = (rstd.reshape(1, -1) @ product.reshape(-1, dim)).reshape(dim).to(weight.dtype)
        x_grad = torch.mul(wide_grad, wide_weight, out=product).mul_(rstd).addcmul_(wide, slope, value=-1)
        return x_grad.to(x.dtype), weight_grad, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(grad, cos, sin, -1), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (x1, x2), (out1, out2) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=direction)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        up_grad = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), up_grad


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `plain_rms_norm`; x [..., d], weight [d]."""
    return plain_rms_norm(x, weight, eps) if torch.compiler.is_compiling() else _RMSNorm.apply(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `plain_rotate`; cos and sin receive no gradient."""
    return plain_rotate(x, cos, sin) if torch.compiler.is_compiling() else _Rotate.apply(x, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `plain_swiglu`; gate and up have the same shape."""
    return plain_swiglu(gate, up) if torch.compiler.is_compiling() else _SwiGLU.apply(gate, up)
