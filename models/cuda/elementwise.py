"""Norms, rotations and SwiGLU, one kernel each; only SwiGLU has a gradient.

Results are rounded where the functions of `archon.models.cpu.fused` round them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program, heads times features.
_TILE = 2048


@triton.jit
def _scaled(x, rstd, weight, offset, ROUNDS_ONCE: tl.constexpr, dtype: tl.constexpr):
    """Return the normalized x times its weight, in float32 with the values of `dtype`."""
    normed = x * rstd[:, None]
    if ROUNDS_ONCE:
        return (normed * (offset + weight)[None, :]).to(dtype).to(tl.float32)
    return (normed.to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _norm_and_rotate(
    X,
    Weight,
    Cos,
    Sin,
    Out,
    n_heads,
    x_token_stride,
    x_head_stride,
    angle_stride,
    eps,
    offset,
    HEADS: tl.constexpr,  # heads of a program
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,  # pairs of rotated features; 0 for no rotation
    PADDED_HALF: tl.constexpr,
    REST: tl.constexpr,  # features after them
    PADDED_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row, out = X + token * x_token_stride + head * x_head_stride, Out + (token * n_heads + head) * WIDTH
    dtype: tl.constexpr = X.dtype.element_ty
    squares = tl.zeros((HEADS,), tl.float32)
    # 1. Read the features.
    if HALF:
        pair = tl.arange(0, PADDED_HALF)
        first = pair * 2 if INTERLEAVED else pair
        second = first + 1 if INTERLEAVED else first + HALF
        is_pair = (head < n_heads)[:, None] & (pair < HALF)[None, :]
        x1 = tl.load(row[:, None] + first[None, :], mask=is_pair, other=0.0).to(tl.float32)
        x2 = tl.load(row[:, None] + second[None, :], mask=is_pair, other=0.0).to(tl.float32)
        squares += tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
    if REST:
        rest = 2 * HALF + tl.arange(0, PADDED_REST)
        is_rest = (head < n_heads)[:, None] & (rest < WIDTH)[None, :]
        x3 = tl.load(row[:, None] + rest[None, :], mask=is_rest, other=0.0).to(tl.float32)
        squares += tl.sum(x3 * x3, 1)
    # 2. Normalize.
    if HAS_NORM:
        rstd = 1 / tl.sqrt(squares / WIDTH + eps)
        if HALF:
            weight1 = tl.load(Weight + first, mask=pair < HALF, other=0.0).to(tl.float32)
            weight2 = tl.load(Weight + second, mask=pair < HALF, other=0.0).to(tl.float32)
            x1 = _scaled(x1, rstd, weight1, offset, ROUNDS_ONCE, dtype)
            x2 = _scaled(x2, rstd, weight2, offset, ROUNDS_ONCE, dtype)
        if REST:
            weight3 = tl.load(Weight + rest, mask=rest < WIDTH, other=0.0).to(tl.float32)
            x3 = _scaled(x3, rstd, weight3, offset, ROUNDS_ONCE, dtype)
    # 3. Rotate the pairs, and write.
    if HALF:
        angle: tl.constexpr = Cos.dtype.element_ty
        cos = tl.load(Cos + token * angle_stride + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(Sin + token * angle_stride + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        turned1 = ((x1 * cos).to(angle).to(tl.float32) - x2 * sin).to(angle)
        turned2 = ((x2 * cos).to(angle).to(tl.float32) + x1 * sin).to(angle)
        tl.store(out[:, None] + first[None, :], turned1.to(dtype), mask=is_pair)
        tl.store(out[:, None] + second[None, :], turned2.to(dtype), mask=is_pair)
    if REST:
        tl.store(out[:, None] + rest[None, :], x3.to(dtype), mask=is_rest)


@triton.jit
def _swiglu(Gate, Up, Out, gate_stride, up_stride, width, alpha, limit, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype: tl.constexpr = Out.dtype.element_ty
    gate = tl.load(Gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        scaled = (gate * alpha).to(dtype).to(tl.float32)
        sigmoid = (1 / (1 + tl.exp(-scaled))).to(dtype).to(tl.float32)
        activated, up = (gate * sigmoid).to(dtype).to(tl.float32), (up + 1).to(dtype).to(tl.float32)
    else:
        activated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(Out + row * width + column, (activated * up).to(dtype), mask=inside)


@triton.jit
def _swiglu_backward(
    Grad,
    Gate,
    Up,
    GateGrad,
    UpGrad,
    grad_stride,
    gate_stride,
    up_stride,
    width,
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype: tl.constexpr = Gate.dtype.element_ty
    grad = tl.load(Grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(Gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        # d(g s(a g))/dg = s (1 + a g (1 - s)), for the clamped gate g.
        clamped, factor = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1
        sigmoid = 1 / (1 + tl.exp(-clamped * alpha))
        up_grad = tl.where(tl.abs(up) > limit, 0.0, clamped * sigmoid * grad)
        slope = sigmoid * (1 + alpha * clamped * (1 - sigmoid))
        gate_grad = tl.where(gate > limit, 0.0, grad * factor * slope)
    else:
        # d(g s(g))/dg = s (1 + g (1 - s))
        sigmoid = 1 / (1 + tl.exp(-gate))
        up_grad = (gate * sigmoid).to(dtype).to(tl.float32) * grad
        activated_grad = (grad * up).to(dtype).to(tl.float32)
        gate_grad = activated_grad * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(UpGrad + row * width + column, up_grad.to(dtype), mask=inside)
    tl.store(GateGrad + row * width + column, gate_grad.to(dtype), mask=inside)


@torch.library.custom_op("archon::norm_and_rotate", mutates_args=())
def norm_and_rotate(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    offset: float,
    rounds_once: bool,
    interleaved: bool,
) -> Tensor:
    """Return `plain_rotate` of `plain_rms_norm` of x [T, H, d], see `archon.models.cpu.fused`.

    Args:
        x: features, dense in the last dimension.
        weight: of the norm [d], in the dtype of x; None for no norm.
        cos: of the angles [T, 1, r / 2]; None for no rotation.
        sin: as `cos`.
        eps: option of the norm.
        offset: option of the norm.
        rounds_once: option of the norm.
        interleaved: option of the rotation.
    """
    n_tokens, n_heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = 0 if cos is None else cos.shape[-1]
    rest = width - 2 * half
    padded_half, padded_rest = (triton.next_power_of_2(max(count, 1)) for count in (half, rest))
    heads = max(1, min(triton.next_power_of_2(n_heads), _TILE // triton.next_power_of_2(width)))
    _norm_and_rotate[n_tokens, triton.cdiv(n_heads, heads)](
        x,
        weight if weight is not None else x,
        cos if cos is not None else x,
        sin if sin is not None else x,
        out,
        n_heads,
        *x.stride()[:2],
        0 if cos is None else cos.stride(0),
        eps,
        offset,
        HEADS=heads,
        WIDTH=width,
        HALF=half,
        PADDED_HALF=padded_half,
        REST=rest,
        PADDED_REST=padded_rest,
        HAS_NORM=weight is not None,
        ROUNDS_ONCE=rounds_once or offset != 0,
        INTERLEAVED=interleaved,
        num_warps=4 if heads * width <= _TILE else 8,
    )
    return out


@norm_and_rotate.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _swiglu_launch(
    x: Tensor, alpha: float | None, limit: float
) -> tuple[tuple[int, int], tuple[float, float], dict[str, Any]]:
    """Return the grid, the numbers and the options of a kernel on x [n, d]."""
    block = min(1024, triton.next_power_of_2(x.shape[1]))
    options = {"CLAMPED": alpha is not None, "BLOCK": block, "num_warps": 4}
    return (x.shape[0], triton.cdiv(x.shape[1], block)), (alpha or 0.0, limit), options


@torch.library.custom_op("archon::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor, alpha: float | None = None, limit: float = 0.0) -> Tensor:
    """Return silu(gate) * up for gate and up [n, d], dense in the last dimension. Differentiable.

    With `alpha` it computes `clamped_swiglu` of `archon.models.cpu.fused`, and rounds its gradients once.
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid, numbers, options = _swiglu_launch(gate, alpha, limit)
    _swiglu[grid](gate, up, out, gate.stride(0), up.stride(0), gate.shape[1], *numbers, **options)
    return out


@swiglu.register_fake
def _(gate: Tensor, up: Tensor, *args: Any) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@torch.library.custom_op("archon::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, alpha: float | None, limit: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up of `swiglu`, for grad [n, d]."""
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    gate_grad, up_grad = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    grid, numbers, options = _swiglu_launch(gate, alpha, limit)
    strides = grad.stride(0), gate.stride(0), up.stride(0)
    _swiglu_backward[grid](grad, gate, up, gate_grad, up_grad, *strides, gate.shape[1], *numbers, **options)
    return gate_grad, up_grad


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _swiglu_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *swiglu_backward(grad, *ctx.saved_tensors, *ctx.options), None, None


swiglu.register_autograd(_swiglu_grad, setup_context=_save_inputs)
