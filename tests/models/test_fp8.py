"""8-bit products against a quantiser written out in plain steps, and which layers have them."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale

from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.layers import torchao_fp8
from archon.models.layers.fp8 import (
    E4M3,
    E5M2,
    compute_scale,
    fp8_grouped_linear,
    fp8_linear,
    fp8_matmul,
    fp8_scaled_mm,
    quantize_with_scale,
)
from archon.models.layers.linear import Linear
from archon.models.layers.torchao_fp8 import torchao_linear, torchao_recipe
from archon.models.lora.layers import LoRALayer
from archon.parallel.fp8 import Fp8Scaling
from archon.parallel.fsdp import reshard
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import relative_error
from tests.engine.tiny import full_tensor, make_engine, sft_batch
from tests.tolerances import FP8_PLAIN, REORDER_FP32

RECIPES = ["tensorwise", "rowwise"]
EVEN = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


@dataclass(frozen=True)
class Format:
    """An 8-bit format: bits after the point, the smallest exponent of a normal number, the largest number."""

    bits: int
    smallest: int
    largest: float

    def rounded(self, x: Tensor) -> Tensor:
        """The nearest number of the format, of two equally near ones the even one, for x [...] in float64."""
        exponent = torch.frexp(x).exponent - 1
        step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=self.smallest) - self.bits)
        return (torch.round(x / step) * step).clamp(-self.largest, self.largest)

    def of_whole(self, x: Tensor, power_of_two: bool = True) -> Tensor:
        """x with one scale, rounded and scaled back."""
        scale = self.largest / max(x.abs().max().item(), 1e-12)
        if power_of_two:
            scale = 2.0 ** math.floor(math.log2(scale))
        return self.rounded(x * scale) / scale

    def from_features(self, x: Tensor) -> Tensor:
        """x with a scale for each row, rounded and scaled back."""
        return torch.stack([self.of_whole(row) for row in x])


NARROW, WIDE = Format(3, -6, 448.0), Format(2, -14, 57344.0)


def plain_linear(
    recipe: str, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Result, and the gradients of input and weight, in float64."""
    x, weight, grad = x.double(), weight.double(), grad.double()
    if recipe == "rowwise":
        out = NARROW.from_features(x) @ NARROW.from_features(weight).t()
        grads = NARROW.from_features(grad) @ NARROW.of_whole(weight), grad.t() @ x
    else:
        inputs, matrix = NARROW.of_whole(x, False), NARROW.of_whole(weight, False)
        out = inputs @ matrix.t()
        grads = WIDE.of_whole(grad, False) @ matrix, WIDE.of_whole(grad, False).t() @ inputs
    return out if bias is None else out + bias.double(), *grads


def plain_experts(
    recipe: str, x: Tensor, weight: Tensor, counts: list[int], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of rows sorted by expert: a scale for each row, and in `tensorwise` one for an expert's matrix."""
    x, weight, grad = x.double(), weight.double(), grad.double()
    outs, x_grads, weight_grads = [], [], []
    for rows, matrix, own in zip(x.split(counts), weight, grad.split(counts), strict=True):
        forward = NARROW.of_whole(matrix) if recipe == "tensorwise" else NARROW.from_features(matrix)
        if len(rows):
            outs.append(NARROW.from_features(rows) @ forward.t())
            x_grads.append(NARROW.from_features(own) @ NARROW.of_whole(matrix))
        weight_grads.append(own.t() @ rows)
    return torch.cat(outs), torch.cat(x_grads), torch.stack(weight_grads)


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of very different sizes, so that some round to less than a format's smallest normal number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (x * torch.randn(*shape, generator=generator, dtype=torch.float64).mul(3).exp()).to(dtype)


@pytest.mark.parametrize(("dtype", "form"), [(E4M3, NARROW), (E5M2, WIDE)], ids=["e4m3", "e5m2"])
def test_rounding_is_that_of_the_format(dtype: torch.dtype, form: Format) -> None:
    x = drawn(4096, dtype=torch.float32, seed=1) * torch.logspace(-8, 3, 4096)
    x[:4] = torch.tensor([0.0, form.largest, form.largest * 1.02, -9 * form.largest])
    found = quantize_with_scale(x, torch.ones(()), dtype, by_row=False).values.double()
    assert found.equal(form.rounded(x.double()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_computes_what_plain_steps_do(recipe: str, dtype: torch.dtype, bias: bool) -> None:
    x, weight = drawn(37, 48, dtype=dtype, seed=2), drawn(32, 48, dtype=dtype, seed=3)
    added, grad = drawn(32, dtype=dtype, seed=4) if bias else None, drawn(37, 32, dtype=dtype, seed=5)
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    out = fp8_linear(leaves[0], leaves[1], added, Fp8Scaling(recipe == "rowwise"))
    out.backward(grad)
    assert out.dtype == dtype
    found = out.detach(), leaves[0].grad, leaves[1].grad
    for own, plain in zip(found, plain_linear(recipe, x, weight, added, grad), strict=True):
        assert own is not None
        assert relative_error(own.double(), plain) <= FP8_PLAIN


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_equal_those_of_torchao(power_of_two: bool) -> None:
    x = drawn(4096, 16, dtype=torch.float32, seed=1)
    rows = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    expected = tensor_to_scale(x, E4M3, **rows, round_scales_to_power_of_2=power_of_two)
    assert compute_scale(x, E4M3, True, (), power_of_two).equal(expected)


TORCHAO = [("tensorwise", "tensorwise"), ("rowwise", "rowwise_with_gw_hp")]


def of_torchao(name: str, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient by torchao's own module and emulation."""
    layer = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype))
    layer[0].weight.data.copy_(weight)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    layer = convert_to_float8_training(layer, config=config)
    inputs = x.clone().requires_grad_()
    out = layer(inputs)
    out.backward(grad)
    return out.detach(), inputs.grad, layer[0].weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("recipe", "name"), TORCHAO)
def test_a_linear_layer_equals_the_recipe_of_torchao(recipe: str, name: str, dtype: torch.dtype) -> None:
    x, weight, grad = (
        drawn(96, 256, dtype=dtype, seed=2),
        drawn(160, 256, dtype=dtype, seed=3),
        drawn(96, 160, dtype=dtype, seed=5),
    )
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    out = fp8_linear(*leaves, None, Fp8Scaling(recipe == "rowwise"))
    out.backward(grad)
    tolerance = FP8_PLAIN if dtype == torch.float32 else 2**-8  # sums in another order, rounded to bfloat16
    results = out.detach(), leaves[0].grad, leaves[1].grad
    for result, reference in zip(results, of_torchao(name, x, weight, grad), strict=True):
        assert relative_error(result.double(), reference.double()) <= tolerance


@pytest.mark.parametrize("tokens", [96, 37])
@pytest.mark.parametrize("by_row", [False, True])
def test_the_function_that_cuda_runs_equals_the_emulation(by_row: bool, tokens: int) -> None:
    """`torchao_linear` with torchao's emulation of the CUDA kernel, also inside one compiled graph."""
    assert torchao_fp8.RECIPES[by_row].config == Float8LinearConfig.from_recipe_name(TORCHAO[by_row][1])
    recipe = torchao_recipe(TORCHAO[by_row][1], emulate=True)
    x, weight, grad = (drawn(*shape, dtype=torch.float32, seed=9) for shape in ((tokens, 64), (48, 64), (tokens, 48)))
    results = []
    compiled = torch.compile(lambda x, w: torchao_linear(x, w, recipe), fullgraph=True, backend="aot_eager")
    for compute in (
        lambda x, w: fp8_linear(x, w, None, Fp8Scaling(by_row)),
        lambda x, w: torchao_linear(x, w, recipe),
        compiled,
    ):
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        out = compute(*leaves)
        out.backward(grad)
        results.append((out.detach(), leaves[0].grad, leaves[1].grad))
    for emulated, eager, graph in zip(*results, strict=True):
        assert relative_error(eager.double(), emulated.double()) <= FP8_PLAIN
        assert relative_error(graph.double(), emulated.double()) <= FP8_PLAIN


def test_an_expert_equals_a_linear_layer_of_torchao() -> None:
    counts = [9, 0, 30, 1]
    x, weight = drawn(40, 64, dtype=torch.float32, seed=6), drawn(4, 48, 64, dtype=torch.float32, seed=7)
    grad = drawn(40, 48, dtype=torch.float32, seed=8)
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    out = fp8_grouped_linear(*leaves, torch.tensor(counts), Fp8Scaling(True))
    out.backward(grad)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    parts = zip(*(each.split(counts) for each in (x, grad, out.detach(), leaves[0].grad)), strict=True)
    for expert, (rows, row_grads, *results) in enumerate(parts):
        if not len(rows):
            assert not leaves[1].grad[expert].any()
            continue
        results.append(leaves[1].grad[expert])
        references = of_torchao("rowwise_with_gw_hp", rows, weight[expert], row_grads)
        for result, reference in zip(results, references, strict=True):
            assert relative_error(result.double(), reference.double()) <= FP8_PLAIN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_compute_what_plain_steps_do(recipe: str, dtype: torch.dtype) -> None:
    counts = [9, 0, 30, 1]
    x, weight = drawn(40, 48, dtype=dtype, seed=6), drawn(4, 32, 48, dtype=dtype, seed=7)
    grad = drawn(40, 32, dtype=dtype, seed=8)
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    out = fp8_grouped_linear(leaves[0], leaves[1], torch.tensor(counts), Fp8Scaling(recipe == "rowwise"))
    out.backward(grad)
    found = out.detach(), leaves[0].grad, leaves[1].grad
    for own, plain in zip(found, plain_experts(recipe, x, weight, counts, grad), strict=True):
        assert own is not None
        assert relative_error(own.double(), plain) <= FP8_PLAIN


@pytest.mark.parametrize("by_row", [False, True])
def test_the_kernel_is_given_what_is_emulated(by_row: bool) -> None:
    """`_scaled_mm` runs on a CPU too: operands, their transposes, scales, and tokens that are no multiple of 16."""
    x, weight, grad = (drawn(*shape, dtype=torch.bfloat16, seed=9) for shape in ((37, 48), (32, 48), (37, 32)))
    left, right, own = (
        quantize_with_scale(each, compute_scale(each, form, rows, (), by_row), form, rows)
        for each, form, rows in ((x, E4M3, by_row), (weight, E4M3, by_row), (grad, E4M3 if by_row else E5M2, by_row))
    )
    whole = quantize_with_scale(weight, compute_scale(weight, E4M3, False, (), by_row), E4M3, by_row=False)
    products = [(left, right), (own, whole.transposed())]
    if not by_row:
        products.append((own.transposed(), left.transposed()))
    for pair in products:
        expected, found = fp8_matmul(*pair, torch.bfloat16), fp8_scaled_mm(*pair, torch.bfloat16)
        # Two sums in float32, each rounded to bfloat16.
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().mean()))


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    x, weight = torch.zeros(3, 16, requires_grad=True), torch.ones(32, 16, requires_grad=True)
    out = fp8_linear(x, weight, None, Fp8Scaling(False))
    out.backward(torch.zeros(3, 32))
    assert x.grad is not None and weight.grad is not None
    assert not out.any() and not x.grad.any() and not weight.grad.any()
    spoiled = torch.ones(3, 16).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(float("nan")))
    assert fp8_linear(spoiled, weight, None, Fp8Scaling(True))[1].isnan().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_bfloat16_compute_rounds_the_masters_first(recipe: str, tmp_path: Path) -> None:
    """Mixed precision on one process: masters in float32, products of their bfloat16 values in 8 bits."""
    engine = make_engine(tmp_path, hf=EVEN, dtype="bfloat16", fp8=recipe, optimizer={"lr": 1e-3})
    layer = engine.full_model.layers["1"].feed_forward.w1
    seen: list[tuple[Tensor, Tensor]] = []
    layer.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out)))
    engine.forward_batch(sft_batch())
    reshard(engine.model)
    master = full_tensor(layer.weight).detach()
    assert master.dtype == torch.float32
    x, out = seen[0]
    expected = plain_linear(recipe, x, master.bfloat16(), None, torch.zeros_like(out))[0]
    # One rounding of the sum to bfloat16; the float32 sum before it may lie on the other side of a tie.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    assert (out != expected.bfloat16()).double().mean() < 0.01


MOE = {
    "model_type": "qwen2_moe",
    "num_experts": 16,  # so that a router has sizes that kernels take
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
DELTA = {
    "model_type": "qwen3_5_text",
    "full_attention_interval": 3,
    "linear_num_value_heads": 16,  # and gates too
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "linear_key_head_dim": 16,
}


def converted(engine: Any) -> set[str]:
    return {name for name, module in engine.model.named_modules() if getattr(module, "fp8", None) is not None}


def test_which_layers_are_in_8_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not: embedding, head, norms, routers, shared experts' gates, and layers of sizes that kernels do not take."""
    with caplog.at_level(logging.INFO, "archon.parallel.fp8"):
        engine = make_engine(tmp_path, hf=EVEN | MOE | {"head_dim": 12}, fp8="rowwise")
    found = {name.removeprefix("layers.0.") for name in converted(engine) if name.startswith("layers.0.")}
    shared = {f"moe.shared_experts.{name}" for name in ("w1", "w2", "w3")}
    assert found == {"attention.wq", "attention.wo", "moe.experts", *shared}
    assert not {name for name in converted(engine) if not name.startswith("layers.")}
    assert "layers.0.attention.wk (24 x 64)" in caplog.text


def test_inner_blocks_alone(tmp_path: Path) -> None:
    found = converted(make_engine(tmp_path, hf=EVEN | {"num_hidden_layers": 3}, fp8="rowwise_inner"))
    assert found and all(name.startswith("layers.1.") for name in found)
    with pytest.raises(ConfigError, match="fp8 = rowwise_inner leaves none of 2 blocks in FP8; set fp8 = rowwise"):
        make_engine(tmp_path, hf=EVEN | {"num_hidden_layers": 2}, fp8="rowwise_inner")


def test_gates_of_delta_nets_are_not(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hf=EVEN | DELTA, fp8="rowwise")
    found = {name.removeprefix("layers.0.delta_net.") for name in converted(engine) if "layers.0.delta" in name}
    assert found == {"wq", "wk", "wv", "wz", "wo"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_adapter_adds_what_it_does_in_full_precision(recipe: str) -> None:
    layer = Linear(48, 32, bias=False, role="column")
    layer.fp8, layer.lora = Fp8Scaling(recipe == "rowwise"), LoRALayer(48, 32, 4, 0.5)
    with torch.no_grad():
        for parameter, seed in zip(layer.parameters(), (11, 12, 13), strict=True):
            parameter.copy_(drawn(*parameter.shape, dtype=torch.float32, seed=seed))
    layer.weight.requires_grad_(False)
    x = drawn(20, 48, dtype=torch.float32, seed=14)
    out = layer(x)
    base = fp8_linear(x, layer.weight, None, layer.fp8)
    assert relative_error(out - base, 0.5 * (x @ layer.lora.a.t() @ layer.lora.b.t())) <= REORDER_FP32
    out.sum().backward()
    assert layer.lora.a.grad is not None and layer.weight.grad is None


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fp8 = rowwise converts none of this model's layers"):
        make_engine(tmp_path, hf={"hidden_size": 40}, fp8="rowwise")


def test_several_adapters_have_no_scale_in_common(tmp_path: Path) -> None:
    several = {"loras": {"x": {"rank": 2}, "y": {"rank": 3}}}
    with pytest.raises(ConfigError, match="each of several LoRAs trains as if it were alone; set fp8 = rowwise"):
        EngineConfig.parse({"path": "model", "fp8": "tensorwise", "lora": several}, source="model")
    EngineConfig.parse({"path": "model", "fp8": "rowwise", "lora": several}, source="model")


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_trained_and_exported_have_all_their_bits(recipe: str, tmp_path: Path) -> None:
    plain = make_engine(tmp_path, hf=EVEN, seed=5)
    engine = make_engine(tmp_path, hf=EVEN, seed=5, fp8=recipe, optimizer={"lr": 1e-3})
    for (name, own), (_, expected) in zip(engine.hf_weights(), plain.hf_weights(), strict=True):
        assert own.equal(expected), name
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    assert all(own.dtype == torch.float32 for _, own in engine.hf_weights())


def test_documents_that_begin_alike_are_computed_one_by_one(tmp_path: Path) -> None:
    """What a micro-batch of a layout that gathers keys computes, which shares nothing, is the same."""
    document = torch.arange(60) % 50
    batch = {
        "input_ids": document.expand(4, -1).clone(),
        "attention_mask": torch.ones(4, 60, dtype=torch.bool),
        "loss_mask": torch.ones(4, 60),
    }
    for fp8, shared in (("none", True), ("rowwise", False)):
        engine = make_engine(tmp_path, hf=EVEN, fp8=fp8, max_tokens_per_mb=600, optimizer={"lr": 1e-3})
        metrics = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
        assert (metrics["tokens_computed"] < metrics["tokens"]) == shared
