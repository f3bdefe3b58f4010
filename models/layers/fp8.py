"""Matrix products in 8-bit floating point (Micikevicius et al. 2022, arXiv:2209.05433), forward and backward.

An operand is rounded to 8 bits with a scale, x ≈ scale · q, where scale = max |x| / (the largest number of the format):

- `tensorwise`, as torchao's recipe of that name: one scale for each operand of the three products of a linear layer,
  e4m3 for inputs and weights, e5m2 for gradients.
- `rowwise`, as torchao's `rowwise_with_gw_hp`: e4m3 everywhere, one scale for each row of inputs, weights and
  gradients; one for the whole weight where it is multiplied with gradients; its own gradient in the compute dtype.

Experts have a scale for each row of inputs and of gradients, e4m3 and their weights' gradients in the compute dtype in
both, as `scaled_grouped_mm` multiplies; `tensorwise` gives each expert's matrix one scale in place of one a row.

On CUDA products are `torch.nn.functional.scaled_mm` and `scaled_grouped_mm`, which `make test-gpu` compares with the
emulation elsewhere: operands are rounded likewise, and multiplied in at least float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archon.models.layers.matmul import grouped_linear, grouped_weight_gradient, matmul_nt, mm
from archon.parallel.comm import Group, all_reduce
from archon.parallel.fp8 import MULTIPLE, Fp8Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Quantized(NamedTuple):
    """A matrix [m, k], or a stack [E, m, k], as 8-bit `values` times a `scale`, in at least float32.

    The scale is [1, 1], or [m, 1] `by_row`; of a stack [E, 1, 1] or [E, m, 1].
    """

    values: Tensor
    scale: Tensor
    by_row: bool

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return scale · values in `dtype`."""
        return self.values.to(dtype) * self.scale.to(dtype)

    def transposed(self) -> Quantized:
        """Return the transpose [k, m] of a matrix, or of each of a stack, that has one scale."""
        assert not self.by_row
        return Quantized(self.values.transpose(-2, -1), self.scale, by_row=False)


def compute_scale(x: Tensor, dtype: torch.dtype, by_row: bool, groups: Iterable[Group]) -> Tensor:
    """Return the scale with which x [m, k] or [E, m, k] fits into an 8-bit `dtype`, see `Quantized`.

    `groups` are the ranks that hold other parts of what the scale is of. Zeros have the smallest normal scale.
    """
    dims = (-1,) if by_row or x.dim() == 2 else (-2, -1)
    wide = torch.promote_types(x.dtype, torch.float32)
    amax = x.abs().amax(dims, keepdim=True).to(wide)
    if not by_row and x.dim() == 2:
        amax = amax.amax(0, keepdim=True)
    for group in groups:
        amax = all_reduce(amax, group, "max")
    # Divided by a tensor: a GPU multiplies by the reciprocal of a number, whose scale rounds ties otherwise.
    largest = amax.new_full((), torch.finfo(dtype).max)
    return (amax / largest).clamp(min=torch.finfo(torch.float32).tiny)


def quantize_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype, by_row: bool) -> Quantized:
    """Return x / scale, rounded to the nearest number of `dtype`; what is beyond its largest becomes that."""
    largest = torch.finfo(dtype).max
    return Quantized((x.to(scale.dtype) / scale).clamp(-largest, largest).to(dtype), scale, by_row)


def _quantize(x: Tensor, dtype: torch.dtype, by_row: bool, groups: Iterable[Group]) -> Quantized:
    return quantize_with_scale(x, compute_scale(x, dtype, by_row, groups), dtype, by_row)


def fp8_matmul(left: Quantized, right: Quantized, dtype: torch.dtype, *, use_fast_accum: bool = False) -> Tensor:
    """Return left [m, k] times the transpose of right [n, k], in `dtype`: [m, n].

    `use_fast_accum`: sums of products on Hopper GPUs have fewer bits, as torchao's recipes have it.
    """
    if left.values.is_cuda:
        return fp8_scaled_mm(left, right, dtype, use_fast_accum)
    wide = torch.promote_types(dtype, torch.float32)
    return matmul_nt(left.dequantize(wide), right.dequantize(wide)).to(dtype)


def fp8_scaled_mm(left: Quantized, right: Quantized, dtype: torch.dtype, use_fast_accum: bool = False) -> Tensor:
    """Same as `fp8_matmul`, by the 8-bit kernel, whose operands are contiguous along k."""
    by_row = left.by_row or right.by_row
    recipe = F.ScalingType.RowWise if by_row else F.ScalingType.TensorWise
    scales = [x.scale.expand(x.values.shape[0], 1).contiguous() if by_row else x.scale for x in (left, right)]
    return F.scaled_mm(
        _contiguous(left.values),
        _contiguous(right.values).t(),
        scales[0],
        recipe,
        scales[1].t(),
        recipe,
        output_dtype=dtype,
        use_fast_accum=use_fast_accum,
    )


def _contiguous(values: Tensor) -> Tensor:
    """Return 8-bit values [..., m, k] in memory of their own, with zeros appended up to a multiple of 16 along k.

    A number of tokens may be any; zeros add nothing to a sum.
    """
    missing = -values.shape[-1] % MULTIPLE
    # As bytes, which every device copies; a zero is one in both formats.
    raw = values.view(torch.uint8).contiguous()
    return (F.pad(raw, (0, missing)) if missing else raw).view(values.dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Fp8Scaling) -> Tensor:
        by_row, columns = scaling.by_row, (scaling.in_features,)
        own = _quantize(x, E4M3, by_row, columns if by_row else (*scaling.tokens, *columns))
        matrix = _quantize(weight, E4M3, by_row, columns if by_row else (*columns, scaling.out_features))
        # The input as it is, which other layers save too, and not its 8 bits.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, own.scale, matrix.scale)
        ctx.scaling = scaling
        out = fp8_matmul(own, matrix, x.dtype, use_fast_accum=True)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, x_scale, scale = ctx.saved_tensors
        scaling: Fp8Scaling = ctx.scaling
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        x_grad = weight_grad = None
        own: Quantized | None = None
        if needs_x or not scaling.by_row:
            of_rows = (scaling.out_features,)
            groups = of_rows if scaling.by_row else (*scaling.tokens, *of_rows)
            own = _quantize(grad, E4M3 if scaling.by_row else E5M2, scaling.by_row, groups)
        if needs_x:
            assert own is not None
            if scaling.by_row:
                scale = compute_scale(weight, E4M3, False, (scaling.in_features, scaling.out_features))
            matrix = quantize_with_scale(weight, scale, E4M3, by_row=False)
            x_grad = fp8_matmul(own, matrix.transposed(), grad.dtype, use_fast_accum=scaling.by_row)
        if needs_weight and scaling.by_row:
            weight_grad = mm(grad.t(), x)
        elif needs_weight:
            assert own is not None
            inputs = quantize_with_scale(x, x_scale, E4M3, by_row=False)
            weight_grad = fp8_matmul(own.transposed(), inputs.transposed(), grad.dtype)
        return x_grad, weight_grad, grad.sum(0) if needs_bias else None, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Fp8Scaling) -> Tensor:
    """Return x [T, in] times the transpose of weight [out, in], plus bias [out]: [T, out]. Differentiable."""
    return _Fp8Linear.apply(x, weight, bias, scaling)


def _grouped(left: Quantized, right: Quantized, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows left [N, k], sorted by expert, times the transpose of the expert's matrix of right [E, n, k]."""
    if not left.values.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        return grouped_linear(left.dequantize(wide), right.dequantize(wide), counts).to(dtype)
    experts, n, _ = right.values.shape
    if left.values.shape[0] == 0:
        return left.values.new_zeros((0, n), dtype=dtype)
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]  # which the stubs leave out
        _contiguous(left.values),
        _contiguous(right.values).transpose(-2, -1),
        left.scale.flatten(),
        F.ScalingType.RowWise,
        right.scale.expand(experts, n, 1).flatten(1).contiguous(),
        F.ScalingType.RowWise,
        offs=counts.cumsum(0).to(torch.int32),
        output_dtype=dtype,
        use_fast_accum=True,
    )


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, scaling: Fp8Scaling) -> Tensor:
        of_columns = (scaling.in_features,)
        own = _quantize(x, E4M3, True, of_columns)
        groups = of_columns if scaling.by_row else (*of_columns, scaling.out_features)
        matrices = _quantize(weight, E4M3, scaling.by_row, groups)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts, matrices.scale)
        ctx.scaling = scaling
        return _grouped(own, matrices, counts, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, counts, scale = ctx.saved_tensors
        scaling: Fp8Scaling = ctx.scaling
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        x_grad = None
        if needs_x:
            if scaling.by_row:
                scale = compute_scale(weight, E4M3, False, (scaling.in_features, scaling.out_features))
            matrices = quantize_with_scale(weight, scale, E4M3, by_row=False)
            own = _quantize(grad, E4M3, True, (scaling.out_features,))
            x_grad = _grouped(own, matrices.transposed(), counts, grad.dtype)
        return x_grad, grouped_weight_gradient(grad, x, counts) if needs_weight else None, None, None


def fp8_grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, scaling: Fp8Scaling) -> Tensor:
    """Return what `grouped_linear` does, of rows x [N, in] and matrices weight [E, out, in], in 8 bits."""
    return _Fp8GroupedLinear.apply(x, weight, counts, scaling)
