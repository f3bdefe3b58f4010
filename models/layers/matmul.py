"""Float32 matmuls by oneDNN on a CPU, LoRA matmuls, and grouped matmuls.

On AMD processors with AVX-512, oneDNN is up to twice as fast as MKL, which torch uses and which runs AVX2 there. torch
exposes oneDNN's float32 matmul only as an operator without a gradient, so this module implements the gradient. Other
dtypes and devices, compiled code, tensor subclasses and tiny matrices use torch's matmul.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from archon.parallel.torch_private import has_onednn_linear, onednn_linear

# Smaller matmuls use torch: oneDNN spends half a millisecond on a primitive for each new shape, and every batch of
# documents has new shapes.
MIN_MULTIPLICATIONS = 1 << 25


@functools.cache
def has_onednn() -> bool:
    """Return whether this processor and torch version support oneDNN's matmul."""
    return platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available() and has_onednn_linear()


def _can_use_onednn(left: Tensor, right: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # first: torch.compile would specialize on the other conditions
        and left.numel() * right.shape[0] >= MIN_MULTIPLICATIONS
        and left.dtype == right.dtype == torch.float32
        and left.device.type == "cpu"
        and type(left) in (Tensor, nn.Parameter)
        and type(right) in (Tensor, nn.Parameter)
        and has_onednn()
    )


def _dense(x: Tensor) -> Tensor:
    """Return x in a layout that oneDNN reads: contiguous, or a transposed contiguous matrix."""
    return x if x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) else x.contiguous()


def matmul_nt(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left [..., k] @ right [n, k]^T + bias [n]: [..., n]. Not differentiable."""
    if _can_use_onednn(left, right):
        return onednn_linear(_dense(left), _dense(right), bias)
    return F.linear(left, right, bias)


def mm(left: Tensor, right: Tensor) -> Tensor:
    """Return left [n, k] @ right [k, m]: [n, m], each row- or column-major. Not differentiable."""
    if not _can_use_onednn(left, right.t()):
        return left @ right
    (n, k), m = left.shape, right.shape[1]
    if not left.is_contiguous() and m * (n + k) < n * k:
        # oneDNN copies a column-major left matrix; here copying the right matrix and the result moves fewer bytes.
        return matmul_nt(right.t(), left).t().contiguous()
    return matmul_nt(left, right.t())


def accumulate_matmul(out: Tensor, left: Tensor, right: Tensor, *, first: bool = False) -> None:
    """Compute out += left @ right, or out = left @ right if `first`. Not differentiable."""
    if out.dtype == left.dtype and not _can_use_onednn(left, right.t()):
        out.addmm_(left, right, beta=0 if first else 1)
    elif out.is_cuda:
        # The matmul itself adds half-precision products to float32 sums.
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=0 if first else 1, out=out)
    elif first:
        out.copy_(mm(left, right))
    else:
        out.add_(mm(left, right))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return matmul_nt(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_rows = grad.flatten(0, -2)
        return (
            matmul_nt(grad, weight.t()) if needs_x else None,
            mm(grad_rows.t(), x.flatten(0, -2)) if needs_weight else None,
            grad_rows.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` of x [..., k], weight [n, k] and bias [n]: [..., n]. Differentiable."""
    if not _can_use_onednn(x, weight) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return matmul_nt(x, weight, bias)
    return _Linear.apply(x, weight, bias)


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        # Not in place: `selective: op` recomputation keeps matmul results and rejects changes to them.
        low = matmul_nt(x, a) * scale
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return matmul_nt(x, weight, bias) + mm(low, b.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        low_grad = matmul_nt(grad, b.t()).mul_(ctx.scale)
        x_grad = None
        if needs_x:
            x_grad = matmul_nt(grad, weight.t())
            accumulate_matmul(x_grad, low_grad, a)
        return (
            x_grad,
            mm(grad.t(), x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            mm(low_grad.t(), x) if needs_a else None,
            mm(grad.t(), low) if needs_b else None,
            None,
        )


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return x W^T + bias + scale * x a^T b^T, for x [T, in], W [out, in], a [r, in], b [out, r].

    A custom autograd function: plain autograd would allocate memory for the sum of the two terms, forward and backward.
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias) + F.linear(F.linear(x, a) * scale, b)
    return _LoRALinear.apply(x, weight, bias, a, b, scale)


class LoRAGroup(NamedTuple):
    """Consecutive rows with one LoRA.

    Attributes:
        n_rows: number of rows.
        lora: index of the LoRA in the list of (a, b) pairs; None for rows without one.
        expert: index into stacks of expert matrices; None without experts.
        scale: factor on b a.
    """

    n_rows: int
    lora: int | None
    expert: int | None
    scale: float


class _AddLoRAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, groups: Sequence[LoRAGroup], *parts: Tensor) -> Tensor:
        result, counts = torch.empty_like(out), [rows.n_rows for rows in groups]
        lows = []
        splits = (tensor.split(counts) for tensor in (x, out, result))
        for rows, x_rows, out_rows, result_rows in zip(groups, *splits, strict=True):
            if rows.lora is None:
                result_rows.copy_(out_rows)
                continue
            a, b = _matrices(rows, parts)
            # Not in place, and in the order of `_LoRALinear`, so that a LoRA computes the same bits as alone.
            lows.append(matmul_nt(x_rows, a) * rows.scale)
            torch.add(out_rows, mm(lows[-1], b.t()), out=result_rows)
        ctx.save_for_backward(x, *parts, *lows)
        ctx.groups, ctx.counts = groups, counts
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        n_parts = len(ctx.needs_input_grad) - 3
        parts, lows = saved[:n_parts], iter(saved[n_parts:])
        grads: list[Tensor | None] = [None] * n_parts
        x_grad = torch.empty_like(x)
        splits = (tensor.split(ctx.counts) for tensor in (x, grad, x_grad))
        for rows, x_rows, grad_rows, x_grad_rows in zip(ctx.groups, *splits, strict=True):
            if rows.lora is None:
                x_grad_rows.zero_()
                continue
            a, b = _matrices(rows, parts)
            low_grad = matmul_nt(grad_rows, b.t()).mul_(rows.scale)
            accumulate_matmul(x_grad_rows, low_grad, a, first=True)
            matrix_grads = mm(low_grad.t(), x_rows), mm(grad_rows.t(), next(lows))
            for index, matrix in zip((2 * rows.lora, 2 * rows.lora + 1), matrix_grads, strict=True):
                if rows.expert is None:
                    grads[index] = matrix
                    continue
                stack = grads[index]
                if stack is None:
                    stack = grads[index] = torch.zeros_like(parts[index])
                stack[rows.expert] = matrix
        part_grads = (torch.zeros_like(part) if g is None else g for part, g in zip(parts, grads, strict=True))
        return grad, x_grad, None, *part_grads


def _matrices(rows: LoRAGroup, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    assert rows.lora is not None
    a, b = parts[2 * rows.lora], parts[2 * rows.lora + 1]
    return (a, b) if rows.expert is None else (a[rows.expert], b[rows.expert])


def add_loras(out: Tensor, x: Tensor, groups: Sequence[LoRAGroup], parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return out [N, out] + scale * x a^T b^T for x [N, in], with one pair of matmuls per group of rows.

    Every a [r, in] and b [out, r] of `parts`, or [E, r, in] and [E, out, r], gets a gradient, 0 without rows. No two
    groups use the same matrices.
    """
    return _AddLoRAs.apply(out, x, groups, *(matrix for part in parts for matrix in part))


def supports_grouped_mm(x: Tensor, *widths: int) -> bool:
    """Return whether `grouped_mm` supports rows x and matrices of these widths.

    It rejects float64, an empty x, and rows that are not a multiple of 16 bytes.
    """
    aligned = not any(width * x.element_size() % 16 for width in widths)
    return aligned and x.dtype != torch.float64 and x.shape[0] > 0


def padded_group_width(width: int, x: Tensor) -> int:
    """Return the next width that `grouped_mm` supports in the dtype of x."""
    step = 16 // x.element_size()
    return -(-width // step) * step


def group_ends(counts: Tensor) -> Tensor:
    """Return the end of each group of rows, int32 [E], from the number of its rows, int64 [E]."""
    return counts.cumsum(0, dtype=torch.int32)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, ends: Tensor | None = None) -> Tensor:
    """Multiply rows x [N, in], sorted by expert, by their expert's matrix of [E, out, in]: [N, out].

    The first counts[0] rows belong to expert 0, and so on. `grouped_mm` needs no host synchronization on the counts; a
    loop covers the shapes that it does not support. `ends` are `group_ends` of the counts, if they are known.
    """
    if not supports_grouped_mm(x, *weight.shape[1:]):
        parts = x.split(counts.tolist())
        return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(parts, weight.unbind(), strict=True)])
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=group_ends(counts) if ends is None else ends)


def grouped_weight_gradient(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Return the weight gradient [E, out, in] of `grouped_linear` for output gradient grad [N, out].

    Not differentiable.
    """
    if not supports_grouped_mm(x, grad.shape[1], x.shape[1]):
        sizes = counts.tolist()
        pairs = zip(grad.split(sizes), x.split(sizes), strict=True)
        return torch.stack([grad_rows.t() @ x_rows for grad_rows, x_rows in pairs])
    return F.grouped_mm(grad.contiguous().t(), x, offs=group_ends(counts))
