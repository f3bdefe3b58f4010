"""FP8 matmuls by torchao (extra `fp8`): its training recipes for whole operands, and its CUDA kernel for sharded ones.

torchao's function quantizes by ordinary operators and multiplies by `aten._scaled_mm`, which torch.compile traces in
every supported version, so that quantization becomes part of the surrounding kernels.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, LinearMMConfig, convert_to_float8_training
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_ops import addmm_float8_unwrapped


class TorchaoRecipe(NamedTuple):
    """torchao's settings of a linear layer and of its three matmuls."""

    config: Float8LinearConfig
    matmuls: LinearMMConfig


def torchao_recipe(name: str, *, emulate: bool = False) -> TorchaoRecipe:
    """Return torchao's recipe `name`; `emulate` multiplies in float32 in place of the CUDA kernel."""
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=emulate)
    # The conversion also stops Inductor from generating code that Triton miscompiles next to stores of FP8 values
    # (https://github.com/triton-lang/triton/issues/11111).
    layer = convert_to_float8_training(nn.Linear(16, 16, bias=False, device="meta"), config=config)
    matmuls = cast(LinearMMConfig, layer.linear_mm_config)
    # A weight gradient sums over tokens; their number need not be a multiple of 16.
    return TorchaoRecipe(config, matmuls._replace(grad_weight=matmuls.grad_weight._replace(pad_inner_dim=True)))


RECIPES = {False: torchao_recipe("tensorwise"), True: torchao_recipe("rowwise_with_gw_hp")}
"""The recipes of `Fp8Scaling.by_row`."""


def torchao_linear(x: Tensor, weight: Tensor, recipe: TorchaoRecipe) -> Tensor:
    """Return x [T, in] @ weight [out, in]^T in FP8: [T, out]. Differentiable."""
    return cast(Tensor, matmul_with_hp_or_float8_args.apply(x, weight.t(), recipe.matmuls, recipe.config))


def torchao_scaled_mm(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype, *, use_fast_accum: bool
) -> Tensor:
    """Return left [m, k] / left_scale @ (right [n, k] / right_scale)^T in `dtype`: [m, n].

    Both operands are FP8 and contiguous. The scales are [1, 1] and [1, 1], or [m, 1] and [n, 1].
    """
    return cast(
        Tensor,
        addmm_float8_unwrapped(left, left_scale, right.t(), right_scale.t(), dtype, use_fast_accum=use_fast_accum),
    )
