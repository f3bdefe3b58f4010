"""FP8 matmuls (Micikevicius et al. 2022, arXiv:2209.05433), forward and backward.

An operand is quantized with a scale, q = scale · x rounded, with scale = (largest value of the format) / max |x|:

- `tensorwise` equals torchao's recipe of that name: one scale for each operand of a linear layer's three matmuls,
  e4m3 for inputs and weights, e5m2 for gradients.
- `rowwise` equals torchao's `rowwise_with_gw_hp`, not its `rowwise`: e4m3 everywhere, one scale for each row of inputs,
  weights and gradients, rounded down to a power of two. The input gradient uses one scale for the whole weight; the
  weight gradient stays in the compute dtype.

With `rowwise` each expert computes as such a linear layer. With `tensorwise` experts differ in one point: the forward
uses one scale for each expert's matrix instead of one per row. torchao's prototype for experts differs from both: it
also quantizes weight gradients, and needs every expert's number of rows to be a multiple of 16.

CUDA uses torchao (`archon.models.layers.torchao_fp8`). A linear layer runs torchao's function, unless tensor or
context parallelism shards an operand: then the code below finds the scale over all ranks, and torchao's kernel
multiplies. Experts use the operator `_scaled_grouped_mm`. Other devices emulate FP8 with the same rounding and matmuls
in at least float32. `make test-gpu` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from archon.models.layers.matmul import group_ends, grouped_linear, grouped_weight_gradient, matmul_nt, mm
from archon.parallel.comm import Group, all_reduce
from archon.parallel.fp8 import MULTIPLE, Fp8Scaling
from archon.parallel.torch_private import scaled_grouped_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Quantized(NamedTuple):
    """FP8 `values` of a matrix [m, k], or a stack [E, m, k], that was multiplied by `scale` in at least float32.

    The scale is [1, 1], or [m, 1] if `by_row`; for a stack [E, 1, 1] or [E, m, 1].
    """

    values: Tensor
    scale: Tensor
    by_row: bool

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return values / scale in `dtype`."""
        return self.values.to(dtype) / self.scale.to(dtype)

    def transposed(self) -> Quantized:
        """Return the transpose of each matrix; each must have one scale."""
        assert not self.by_row
        return Quantized(self.values.transpose(-2, -1), self.scale, by_row=False)


def compute_scale(x: Tensor, dtype: torch.dtype, by_row: bool, groups: Iterable[Group], power_of_two: bool) -> Tensor:
    """Return the scale that fits x [m, k] or [E, m, k] into the FP8 `dtype`, shaped as in `Quantized`.

    `groups` are the ranks with other parts of the scaled matrix or row. A maximum is at least 1e-12, as in torchao.
    """
    dims = (-1,) if by_row or x.dim() == 2 else (-2, -1)
    amax = x.abs().amax(dims, keepdim=True).double()
    if not by_row and x.dim() == 2:
        amax = amax.amax(0, keepdim=True)
    for group in groups:
        amax = all_reduce(amax, group, "max")
    # In float64, so that compiled code and GPUs, which divide differently in float32, have the same scale.
    scale = torch.finfo(dtype).max / amax.clamp(min=1e-12)
    if power_of_two:
        scale = scale.log2().floor().exp2()
    return scale.to(torch.promote_types(x.dtype, torch.float32))


def quantize_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype, by_row: bool) -> Quantized:
    """Return x · scale, rounded to the nearest value of `dtype` and clamped to its range."""
    largest = torch.finfo(dtype).max
    return Quantized((x.to(scale.dtype) * scale).clamp(-largest, largest).to(dtype), scale, by_row)


def _quantize(x: Tensor, dtype: torch.dtype, by_row: bool, groups: Iterable[Group], power_of_two: bool) -> Quantized:
    return quantize_with_scale(x, compute_scale(x, dtype, by_row, groups, power_of_two), dtype, by_row)


def fp8_matmul(left: Quantized, right: Quantized, dtype: torch.dtype, *, use_fast_accum: bool = False) -> Tensor:
    """Return left [m, k] @ right [n, k]^T in `dtype`: [m, n].

    `use_fast_accum` sums with fewer bits on Hopper GPUs, as torchao's recipes do in the forward.
    """
    if left.values.is_cuda:
        return fp8_scaled_mm(left, right, dtype, use_fast_accum)
    wide = torch.promote_types(dtype, torch.float32)
    return matmul_nt(left.dequantize(wide), right.dequantize(wide)).to(dtype)


def fp8_scaled_mm(left: Quantized, right: Quantized, dtype: torch.dtype, use_fast_accum: bool = False) -> Tensor:
    """Compute `fp8_matmul` by the CUDA kernel, which needs operands contiguous along k."""
    from archon.models.layers.torchao_fp8 import torchao_scaled_mm

    scales = [x.scale for x in (left, right)]
    if left.by_row or right.by_row:
        scales = [x.scale.expand(x.values.shape[0], 1).contiguous() for x in (left, right)]
    operands = _contiguous(left.values), scales[0], _contiguous(right.values), scales[1]
    return torchao_scaled_mm(*operands, dtype, use_fast_accum=use_fast_accum)


def _contiguous(values: Tensor) -> Tensor:
    """Return FP8 values [..., m, k] contiguous, with k padded by zeros to a multiple of 16.

    k may be a number of tokens, which is arbitrary; zeros add nothing to a sum.
    """
    missing = -values.shape[-1] % MULTIPLE
    # Copy as bytes, which every device supports; byte 0 is the number 0 in both formats.
    raw = values.view(torch.uint8).contiguous()
    if torch.compiler.is_compiling() or missing:  # compiled code must not depend on whether a batch needs padding
        raw = F.pad(raw, (0, missing))
    return raw.view(values.dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Fp8Scaling) -> Tensor:
        by_row, columns = scaling.by_row, (scaling.in_features,)
        inputs = _quantize(x, E4M3, by_row, columns if by_row else (*scaling.tokens, *columns), by_row)
        matrix = _quantize(weight, E4M3, by_row, columns if by_row else (*columns, scaling.out_features), by_row)
        # Save the input itself, which other layers save too, instead of its FP8 copy.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, inputs.scale, matrix.scale)
        ctx.scaling = scaling
        out = fp8_matmul(inputs, matrix, x.dtype, use_fast_accum=True)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, x_scale, scale = ctx.saved_tensors
        scaling: Fp8Scaling = ctx.scaling
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        x_grad = weight_grad = None
        grads: Quantized | None = None
        if needs_x or not scaling.by_row:
            row_groups = (scaling.out_features,)
            groups = row_groups if scaling.by_row else (*scaling.tokens, *row_groups)
            grads = _quantize(grad, E4M3 if scaling.by_row else E5M2, scaling.by_row, groups, scaling.by_row)
        if needs_x:
            assert grads is not None
            if scaling.by_row:
                scale = compute_scale(weight, E4M3, False, (scaling.in_features, scaling.out_features), True)
            matrix = quantize_with_scale(weight, scale, E4M3, by_row=False)
            x_grad = fp8_matmul(grads, matrix.transposed(), grad.dtype)
        if needs_weight and scaling.by_row:
            weight_grad = mm(grad.t(), x)
        elif needs_weight:
            assert grads is not None
            inputs = quantize_with_scale(x, x_scale, E4M3, by_row=False)
            weight_grad = fp8_matmul(grads.transposed(), inputs.transposed(), grad.dtype)
        return x_grad, weight_grad, grad.sum(0) if needs_bias else None, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Fp8Scaling) -> Tensor:
    """Return x [T, in] @ weight [out, in]^T + bias [out] in FP8: [T, out]. Differentiable."""
    if x.is_cuda and not scaling.is_sharded:
        from archon.models.layers.torchao_fp8 import RECIPES, torchao_linear

        out = torchao_linear(x, weight, RECIPES[scaling.by_row])
        return out if bias is None else out + bias
    return _Fp8Linear.apply(x, weight, bias, scaling)


def _grouped(left: Quantized, right: Quantized, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows left [N, k], sorted by expert, by their expert's matrix of right [E, n, k]: [N, n]."""
    if not left.values.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        return grouped_linear(left.dequantize(wide), right.dequantize(wide), counts).to(dtype)
    experts, n, _ = right.values.shape
    if left.values.shape[0] == 0:
        return left.values.new_zeros((0, n), dtype=dtype)
    return scaled_grouped_mm(
        _contiguous(left.values),
        _contiguous(right.values).transpose(-2, -1),
        left.scale.reciprocal().flatten(),
        right.scale.reciprocal().expand(experts, n, 1).flatten(1).contiguous(),
        offs=group_ends(counts),
        out_dtype=dtype,
        use_fast_accum=True,
    )


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, scaling: Fp8Scaling) -> Tensor:
        column_groups = (scaling.in_features,)
        inputs = _quantize(x, E4M3, True, column_groups, True)
        groups = column_groups if scaling.by_row else (*column_groups, scaling.out_features)
        matrices = _quantize(weight, E4M3, scaling.by_row, groups, True)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts, matrices.scale)
        ctx.scaling = scaling
        return _grouped(inputs, matrices, counts, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, counts, scale = ctx.saved_tensors
        scaling: Fp8Scaling = ctx.scaling
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        x_grad = None
        if needs_x:
            if scaling.by_row:
                scale = compute_scale(weight, E4M3, False, (scaling.in_features, scaling.out_features), True)
            matrices = quantize_with_scale(weight, scale, E4M3, by_row=False)
            grads = _quantize(grad, E4M3, True, (scaling.out_features,), True)
            x_grad = _grouped(grads, matrices.transposed(), counts, grad.dtype)
        return x_grad, grouped_weight_gradient(grad, x, counts) if needs_weight else None, None, None


def fp8_grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, scaling: Fp8Scaling) -> Tensor:
    """Return `grouped_linear` of rows x [N, in] and weight [E, out, in], in FP8. Differentiable."""
    return _Fp8GroupedLinear.apply(x, weight, counts, scaling)
