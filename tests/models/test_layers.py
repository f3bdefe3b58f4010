"""Norms, rotation and gated networks: the hand-written functions against their plain twins."""

from __future__ import annotations

import pickle

import pytest
import torch
from transformers.activations import ACT2FN

from archon.models.cpu import fused
from archon.models.layers import matmul
from archon.models.layers.feed_forward import ACTIVATIONS, FeedForward
from archon.models.layers.matmul import accumulate_matmul, linear, lora_linear, mm
from archon.models.layers.norm import RMSNorm
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import relative_error
from tests.tolerances import FORMULA_FP32, FORMULA_FP64


def angles(tokens: int, half: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(tokens, 1, half, dtype=dtype)
    return angle.cos(), angle.sin()


CASES = {
    "rms_norm": lambda t: (
        fused.rms_norm,
        fused.plain_rms_norm,
        (torch.randn(5, 3, 8, dtype=t), torch.randn(8, dtype=t)),
        (1e-6,),
    ),
    "rms_norm of a matrix": lambda t: (
        fused.rms_norm,
        fused.plain_rms_norm,
        (torch.randn(5, 8, dtype=t), torch.randn(8, dtype=t)),
        (1e-2,),
    ),
    "rotate": lambda t: (fused.rotate, fused.plain_rotate, (torch.randn(5, 3, 8, dtype=t),), angles(5, 4, t)),
    "rotate a slice": lambda t: (
        fused.rotate,
        fused.plain_rotate,
        (torch.randn(5, 6, 8, dtype=t)[:, 1:4],),
        angles(5, 4, t),
    ),
    "swiglu": lambda t: (
        fused.swiglu,
        fused.plain_swiglu,
        (torch.randn(5, 8, dtype=t), torch.randn(5, 8, dtype=t)),
        (),
    ),
    "clamped_swiglu": lambda t: (
        fused.clamped_swiglu,
        fused.plain_clamped_swiglu,
        (torch.randn(5, 8, dtype=t), torch.randn(5, 8, dtype=t)),
        (1.702, 0.6),  # a limit that clamps a third of the gates and half of the ups
    ),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FORMULA_FP64), (torch.float32, FORMULA_FP32)])
@pytest.mark.parametrize("name", CASES)
def test_fused_functions_and_gradients_equal_their_plain_twins(name: str, dtype: torch.dtype, tolerance: float) -> None:
    function, twin, inputs, rest = CASES[name](dtype)
    inputs = [x.requires_grad_() for x in inputs]
    actual, expected = function(*inputs, *rest), twin(*inputs, *rest)
    assert relative_error(actual, expected) <= tolerance
    weight = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, weight) for y in (actual, expected)), strict=True):
        assert relative_error(ours, theirs) <= tolerance


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    function, _, inputs, rest = CASES[name](torch.float64)
    assert torch.autograd.gradcheck(lambda *x: function(*x, *rest), [x.requires_grad_() for x in inputs])


def test_the_norm_rounds_where_transformers_rounds() -> None:
    x, weight = torch.randn(50, 64, dtype=torch.bfloat16) * 3, torch.randn(64, dtype=torch.bfloat16)
    differing = fused.rms_norm(x, weight, 1e-6) != fused.plain_rms_norm(x, weight, 1e-6)
    assert differing.float().mean() <= 0.01, "only where the two sums of squares straddle a rounding boundary"


@pytest.mark.parametrize("name", CASES)
def test_without_gradients_the_result_is_bitwise_the_same(name: str) -> None:
    function, _, inputs, rest = CASES[name](torch.float32)
    with_gradient = function(*[x.requires_grad_() for x in inputs], *rest)
    assert with_gradient.requires_grad
    with torch.no_grad():
        assert torch.equal(function(*inputs, *rest), with_gradient)


def test_compiled_code_takes_the_plain_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("a hand-written function was traced")

    for function in (fused._RMSNorm, fused._Rotate, fused._SwiGLU):
        monkeypatch.setattr(function, "apply", never)
    for name, make in CASES.items():
        function, twin, inputs, rest = make(torch.float64)
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert relative_error(compiled(*inputs, *rest), twin(*inputs, *rest)) <= FORMULA_FP64, name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_transformers_has_by_the_name(name: str) -> None:
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    assert relative_error(ACTIVATIONS[name](x), ACT2FN[name](x)) <= FORMULA_FP64


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_round_as_transformers_does_and_can_be_pickled(name: str) -> None:
    """Modules may be saved whole or sent to another process; in bfloat16 an equal formula may still round otherwise."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    restored = pickle.loads(pickle.dumps(ACTIVATIONS[name]))  # noqa: S301 (its own bytes)
    assert torch.equal(restored(x), ACT2FN[name](x))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act is 'swoosh'; expected one of silu"):
        FeedForward(4, 8, "swoosh")


def test_roles_are_declared() -> None:
    network = FeedForward(4, 8, "silu")
    assert (network.w1.role, network.w2.role, network.w3.role) == ("column", "row", "column")
    assert RMSNorm(4, 1e-6).role == "norm"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", ["nothing", "input", "weight"])
def test_the_product_by_another_library_equals_torchs_with_its_gradients(
    bias: bool, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 1)
    x, weight = torch.randn(3, 70, 96), torch.randn(64, 96)
    inputs = [t.requires_grad_() for t, name in ((x, "input"), (weight, "weight")) if name != frozen]
    given = torch.randn(64, requires_grad=True) if bias else None
    inputs += [given] if given is not None else []
    actual, expected = linear(x, weight, given), torch.nn.functional.linear(x, weight, given)
    assert relative_error(actual, expected) <= FORMULA_FP32
    # An expanded gradient, as the sum of an output gives, and one that is transposed.
    for grad in (torch.ones(()).expand_as(expected), torch.randn(64, 70, 3).permute(2, 1, 0)):
        ours, theirs = (torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (actual, expected))
        for a, b in zip(ours, theirs, strict=True):
            assert relative_error(a, b) <= FORMULA_FP32


@pytest.mark.parametrize("size", [4, 70, 200, 260])
@pytest.mark.parametrize("lying", ["left", "right", "neither", "both", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_matrices_in_memory_either_way_round_are_torchs(size: int, lying: str, dtype: torch.dtype) -> None:
    left, right = torch.randn(size, 512, dtype=dtype), torch.randn(512, 270 - size, dtype=dtype)
    left = left.t().contiguous().t() if lying in ("left", "both") else left
    right = right.t().contiguous().t() if lying in ("right", "both") else right
    left = left[:1].expand(size, 512) if lying == "expanded" else left
    expected, out = left @ right, torch.full((size, 270 - size), torch.nan, dtype=dtype)
    assert relative_error(mm(left, right), expected) <= FORMULA_FP32
    accumulate_matmul(out, left, right, first=True)
    assert relative_error(out, expected) <= FORMULA_FP32
    accumulate_matmul(out, left, right)
    assert relative_error(out, 2 * expected) <= FORMULA_FP32


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FORMULA_FP64), (torch.float32, FORMULA_FP32)])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "input", "adapter"])
def test_a_product_with_an_adapter_is_the_sum_of_its_parts_with_their_gradients(
    dtype: torch.dtype, tolerance: float, frozen: str
) -> None:
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((300, 96), (64, 96), (64,), (5, 96), (64, 5))]
    kinds = ("input", "weight", "weight", "adapter", "adapter")
    x, weight, bias, a, b = (t.requires_grad_(kind != frozen) for t, kind in zip(inputs, kinds, strict=True))
    actual = lora_linear(x, weight, bias, a, b, 1.5)
    expected = torch.nn.functional.linear(x, weight, bias) + 1.5 * (x @ a.t()) @ b.t()
    assert relative_error(actual, expected) <= tolerance
    trained = [t for t in inputs if t.requires_grad]
    for grad in (torch.ones((), dtype=dtype).expand_as(expected), torch.randn(64, 300, dtype=dtype).t()):
        ours, theirs = (torch.autograd.grad(y, trained, grad, retain_graph=True) for y in (actual, expected))
        for mine, other in zip(ours, theirs, strict=True):
            assert relative_error(mine, other) <= tolerance


def test_compiled_products_are_compiled_once_for_small_and_large_ones() -> None:
    torch._dynamo.reset()
    weight = torch.randn(64, 96)
    compiled = torch.compile(lambda x: linear(x, weight), backend="eager", dynamic=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (3, matmul.MIN_MULTIPLICATIONS // weight.numel() + 1, 7):
        x = torch.randn(rows, 96)
        assert compiled(x).equal(torch.nn.functional.linear(x, weight))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_what_frozen_weights_would_need_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 1)
    x, weight = torch.randn(300, 96, requires_grad=True), torch.randn(64, 96)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, weight)
    assert kept and all(t is weight for t in kept)
    norm = RMSNorm(96, 1e-6).requires_grad_(False)
    norm(x).sum().backward()
    assert norm.weight.grad is None
