"""8-bit products on a GPU, forward and backward, against their emulation on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from archon.models.layers.fp8 import fp8_grouped_linear, fp8_linear
from archon.parallel.fp8 import Fp8Scaling
from archon.tools.check.oracle import relative_error
from tests.tolerances import FP8_GPU

pytestmark = pytest.mark.gpu

RECIPES = ["tensorwise", "rowwise"]


def both(compute: object, *operands: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The result of a function and the gradients of its operands: the GPU's and the CPU's."""
    results = []
    for device in ("cuda", "cpu"):
        leaves = [x.to(device, copy=True).requires_grad_() for x in operands]
        out = compute(*leaves)  # type: ignore[operator]
        out.backward(grad.to(device))
        results.append([x.detach().double().cpu() for x in (out, *(leaf.grad for leaf in leaves))])
    return list(zip(*results, strict=True))


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("tokens", [37, 512])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer(recipe: str, tokens: int) -> None:
    scaling = Fp8Scaling(recipe == "rowwise")
    x, weight, grad = drawn(tokens, 256, seed=1), drawn(96, 256, seed=2), drawn(tokens, 96, seed=3)
    for own, emulated in both(lambda x, w: fp8_linear(x, w, None, scaling), x, weight, grad=grad):
        assert relative_error(own, emulated) <= FP8_GPU


@pytest.mark.parametrize("counts", [[9, 0, 30, 1], [128, 64, 0, 300]])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts(recipe: str, counts: list[int]) -> None:
    scaling, rows = Fp8Scaling(recipe == "rowwise"), sum(counts)
    x, weight, grad = drawn(rows, 256, seed=4), drawn(4, 96, 256, seed=5), drawn(rows, 96, seed=6)

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        return fp8_grouped_linear(x, weight, torch.tensor(counts, device=x.device), scaling)

    for own, emulated in both(compute, x, weight, grad=grad):
        assert relative_error(own, emulated) <= FP8_GPU
