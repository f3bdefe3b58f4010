"""Elementwise layers as autograd functions: fewer memory passes and saved tensors in eager mode.

Each layer has a plain version of ordinary operations, which defines it: `torch.compile` traces and fuses the plain
version, and tests compare the two. Without gradients the eager operations run outside an autograd function, which would
cost as much as they do for few rows, as in a decoding step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from archon.models.cpu import operations

Function = Callable[..., Tensor]


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, rounds_once: bool = False) -> Tensor:
    """Return (offset + weight) * x / sqrt(mean(x^2) + eps) for x [..., d] and weight [d].

    Statistics are in at least float32. Llama rounds the normalized x to its dtype before it multiplies by the weight.
    With an offset or `rounds_once` the result is rounded after the product, as in Gemma and OLMo.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset or rounds_once:
        return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)
    return weight * normed.to(x.dtype)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first r features of x [T, H, d] in pairs by the angles of cos and sin [T, 1, r/2].

    Pairs are (x_i, x_{i + r/2}), or (x_{2i}, x_{2i + 1}) if `interleaved`; the other d - r features stay unchanged.
    """
    width = 2 * cos.shape[-1]
    first, second = _pairs(x, width, interleaved)
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return joined if width == x.shape[-1] else torch.cat((joined, x[..., width:]), dim=-1)


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and second features of each pair among the first `width` features."""
    rotated = x[..., :width]
    if interleaved:
        return rotated[..., 0::2], rotated[..., 1::2]
    first, second = rotated.chunk(2, dim=-1)
    return first, second


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate) * up


def plain_clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate), for gate clamped to at most `limit`.

    `up` is clamped to [-limit, limit].
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _normalize(x: Tensor, weight: Tensor, eps: float, offset: float, rounds_once: bool) -> tuple[Tensor, Tensor | None]:
    """Return the norm of x [..., d], and 1 / sqrt(mean(x^2) + eps) [..., 1] or None from the C kernel."""
    if operations.can_use(x, weight):
        return operations.rms_norm(x, weight, eps, offset), None
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # The 2-norm reads x once and does not write its square to memory.
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
    out = wide * rstd
    if offset or rounds_once:
        return out.mul_(offset + weight.to(out.dtype)).to(x.dtype), rstd
    return out.mul_(weight) if out.dtype == weight.dtype else out.to(x.dtype) * weight, rstd


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, rounds_once: bool) -> Tensor:
        out, rstd = _normalize(x, weight, eps, offset, rounds_once)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps, ctx.offset = eps, offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        if rstd is None:
            needs_weight = ctx.needs_input_grad[1]
            grads = operations.rms_norm_backward(grad, x, weight, ctx.eps, ctx.offset, needs_weight)
            return *grads, None, None, None
        wide, wide_weight, wide_grad = (t.to(rstd.dtype) for t in (x, weight, grad))
        if ctx.offset:
            wide_weight = wide_weight + ctx.offset
        dim = x.shape[-1]
        product = wide_grad * wide
        # With r = (mean x^2 + eps)^(-1/2) and y = x r w: dx = g w r - x r^3 <g w, x> / dim, and dw = sum of g x r.
        slope = (product @ wide_weight).unsqueeze(-1).mul_(rstd).mul_(rstd).mul_(rstd).div_(dim)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = (rstd.reshape(1, -1) @ product.reshape(-1, dim)).reshape(dim).to(weight.dtype)
        x_grad = torch.mul(wide_grad, wide_weight, out=product).mul_(rstd).addcmul_(wide, slope, value=-1)
        return x_grad.to(x.dtype), weight_grad, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate_pairs(x, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(grad, cos, sin, ctx.interleaved, direction=-1), None, None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: int = 1) -> Tensor:
    if cos.shape[0] == len(x) and operations.can_use(x, cos, sin):
        return operations.rotate(x, cos, sin if direction == 1 else -sin, interleaved)
    out, width = torch.empty_like(x, memory_format=torch.contiguous_format), 2 * cos.shape[-1]
    (x1, x2), (out1, out2) = _pairs(x, width, interleaved), _pairs(out, width, interleaved)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=direction)
    return out


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if gate.shape == up.shape and operations.can_use(gate, up):
        return operations.swiglu(gate, up)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if gate.shape == up.shape and operations.can_use(gate, up):
            return operations.swiglu_backward(grad, gate, up)
        up_grad = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), up_grad


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        return plain_clamped_swiglu(gate, up, alpha, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        clamped, factor = gate.clamp(max=ctx.limit), up.clamp(-ctx.limit, ctx.limit).add_(1)
        sigmoid = torch.sigmoid(clamped * ctx.alpha)
        up_grad = (clamped * sigmoid).mul_(grad).masked_fill_(up.abs() > ctx.limit, 0)
        # d(g s(a g))/dg = s + a g s (1 - s)
        slope = (1 - sigmoid).mul_(clamped).mul_(ctx.alpha).add_(1).mul_(sigmoid)
        gate_grad = slope.mul_(factor).mul_(grad).masked_fill_(gate > ctx.limit, 0)
        return gate_grad, up_grad, None, None


def _run(plain: Function, eager: Function, function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Run a layer: traced code runs `plain`, code with gradients `function`, other code `eager`."""
    if torch.compiler.is_compiling():
        return plain(*args)
    return function.apply(*args) if torch.is_grad_enabled() else eager(*args)


def _has_cuda_kernel(x: Tensor, weight: Tensor | None = None, *, with_gradient: bool = False) -> bool:
    """Return whether a kernel of `archon.models.cuda.elementwise` supports x. Compiled code fuses layers itself."""
    return (
        x.is_cuda
        and (with_gradient or not torch.is_grad_enabled())
        and not torch.compiler.is_compiling()
        and x.dtype.itemsize <= 4
        and x.stride(-1) == 1
        and (weight is None or weight.dtype == x.dtype)
    )


def _norm_and_rotate_on_cuda(
    x: Tensor, norm: tuple[Tensor | None, float, float, bool], cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> Tensor:
    from archon.models.cuda.elementwise import norm_and_rotate as kernel

    out: Tensor = kernel(
        x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1]), norm[0], cos, sin, *norm[1:], interleaved
    )
    return out.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, rounds_once: bool = False) -> Tensor:
    """See `plain_rms_norm`."""
    if _has_cuda_kernel(x, weight):
        return _norm_and_rotate_on_cuda(x, (weight, eps, offset, rounds_once), None, None, False)
    return _run(plain_rms_norm, lambda *args: _normalize(*args)[0], _RMSNorm, x, weight, eps, offset, rounds_once)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """See `plain_rotate`; cos and sin get no gradient, and if they are wider than x, it rounds once."""
    if _has_cuda_kernel(x):
        return _norm_and_rotate_on_cuda(x, (None, 0.0, 0.0, False), cos, sin, interleaved)
    return _run(plain_rotate, _rotate_pairs, _Rotate, x.to(cos.dtype), cos, sin, interleaved).to(x.dtype)


def norm_and_rotate(
    x: Tensor, norm: tuple[Tensor, float, float, bool], cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Return `rotate` of `rms_norm` of x [T, H, d]; `norm` is (weight [d], eps, offset, `rounds_once`)."""
    weight, eps, offset, _ = norm
    if _has_cuda_kernel(x, weight):
        return _norm_and_rotate_on_cuda(x, norm, cos, sin, interleaved)
    if not torch.is_grad_enabled() and cos.shape[0] == len(x) and operations.can_use(x, cos, sin, weight):
        return operations.rotate(x, cos, sin, interleaved, weight, eps, offset)
    return rotate(rms_norm(x, *norm), cos, sin, interleaved)


def _swiglu_on_cuda(gate: Tensor, up: Tensor, *options: float) -> Tensor | None:
    """Return SwiGLU, clamped if it has options, by one kernel; None where there is none."""
    if gate.dim() != 2 or not _has_cuda_kernel(gate, up, with_gradient=True) or up.stride(-1) != 1:
        return None
    from archon.models.cuda.elementwise import swiglu as kernel

    fused: Tensor = kernel(gate, up, *options)
    return fused


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `plain_swiglu`; gate and up have the same shape."""
    fused = _swiglu_on_cuda(gate, up)
    return _run(plain_swiglu, _swiglu, _SwiGLU, gate, up) if fused is None else fused


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """See `plain_clamped_swiglu`; gate and up have the same shape."""
    fused = _swiglu_on_cuda(gate, up, alpha, limit)
    if fused is not None:
        return fused
    return _run(plain_clamped_swiglu, plain_clamped_swiglu, _ClampedSwiGLU, gate, up, alpha, limit)
