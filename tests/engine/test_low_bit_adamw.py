"""AdamW with moments in bfloat16 and in 8 bits: against formulas, against torchao, and over a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit

from archon.checkpoint.native import load_latest, save_state
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.low_bit_adamw import LowBitAdamW, block_size, moment_bytes
from archon.engine.optim import build_optimizer
from archon.parallel.fsdp import local_tensor
from archon.schema.config import OptimizerConfig
from archon.schema.errors import CheckpointError
from tests.engine.tiny import make_engine, sft_batch
from tests.tolerances import FORMULA_FP32, FORMULA_FP64

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, beta2=0.99)
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


def stepped(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 4, least: float = 0.0
) -> list[Tensor]:
    """Weights after steps on drawn gradients of at least this magnitude."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for parameter in parameters:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = (drawn + least * drawn.sign()).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def layer(columns: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(columns, 24, dtype=dtype)


def test_moments_in_bfloat16_are_rounded_after_each_step() -> None:
    linear, config = layer(40, torch.float64), CONFIG.model_copy(update={"moments": "bfloat16"})
    value = linear.weight.detach().clone()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    weight, _ = stepped(build_optimizer(linear, config), [linear.weight, linear.bias])
    generator = torch.Generator().manual_seed(7)
    for step in range(1, 5):
        grad = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        torch.randn(24, generator=generator, dtype=torch.float64)
        first = config.beta1 * first + (1 - config.beta1) * grad
        second = config.beta2 * second + (1 - config.beta2) * grad**2
        corrected = (second / (1 - config.beta2**step)).sqrt() + config.eps
        value = value * (1 - config.lr * config.weight_decay) - config.lr * first / (1 - config.beta1**step) / corrected
        first, second = first.bfloat16().double(), second.bfloat16().double()
    torch.testing.assert_close(weight, value, rtol=0, atol=FORMULA_FP64)


def test_moments_that_8_bits_leave_wide_are_those_of_adamw() -> None:
    """Vectors, and rows that no block divides."""
    results = []
    for moments in ("float32", "int8"):
        linear = layer(40)
        assert block_size(linear.weight) is None
        optimizer = build_optimizer(linear, CONFIG.model_copy(update={"moments": moments}))
        results.append(stepped(optimizer, [linear.weight, linear.bias]))
    for narrow, wide in zip(*results, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=0, atol=FORMULA_FP32)


def test_8_bits_are_those_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no second moment is so small that torchao rounds it to 0."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao compiles its update
    monkeypatch.setattr("archon.engine.low_bit_adamw.CHUNK", 5 * 512)  # 24 rows in unequal chunks
    results = []
    for ours in (True, False):
        linear = layer(512)
        if ours:
            optimizer: Any = build_optimizer(linear, CONFIG.model_copy(update={"moments": "int8"}))
        else:
            betas = (CONFIG.beta1, CONFIG.beta2)
            optimizer = AdamW8bit([linear.weight], CONFIG.lr, betas, CONFIG.eps, CONFIG.weight_decay)
        (weight,) = stepped(optimizer, [linear.weight], least=0.1)
        state = optimizer.state[linear.weight]
        codes = [state[name] if ours else state[name].codes for name in ("exp_avg", "exp_avg_sq")]
        results.append((weight, *codes))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=FORMULA_FP32)
    for own, reference in zip(results[0][1:], results[1][1:], strict=True):
        assert own.dtype == torch.uint8 and own.equal(reference)


def test_8_bits_bound_the_update_of_small_gradients_beside_a_large_one() -> None:
    """AdamW moves a weight by about lr, also in a step without a gradient."""
    linear = layer(256)
    optimizer = build_optimizer(linear, CONFIG.model_copy(update={"moments": "int8", "weight_decay": 0.0}))
    for scale in (1.0, 1.0, 1.0, 0.0):
        grad = torch.full_like(linear.weight, 1e-4 * scale)
        grad[:, 0] = scale
        linear.weight.grad, before = grad, linear.weight.detach().clone()
        optimizer.step()
        assert (linear.weight - before).abs().max() < 4 * CONFIG.lr


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_a_rank_without_rows_of_a_matrix_takes_steps(moments: str) -> None:
    linear = nn.Linear(256, 24, bias=False)
    linear.weight = nn.Parameter(torch.empty(0, 256))
    optimizer = build_optimizer(linear, CONFIG.model_copy(update={"moments": moments}))
    stepped(optimizer, [linear.weight], steps=2)
    assert optimizer.state[linear.weight]["step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_the_compiled_update_is_the_eager_one(moments: str) -> None:
    results = []
    for compiled in (False, True):
        linear = layer(512)
        config = CONFIG.model_copy(update={"moments": moments})
        optimizer = build_optimizer(linear, config, compiled=compiled)
        results.append(stepped(optimizer, [linear.weight, linear.bias], steps=1))
    for graph, eager in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=0, atol=FORMULA_FP32)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_bytes_of_moments_are_those_the_planner_counts(moments: str) -> None:
    linear = nn.Linear(512, 64, bias=False)
    optimizer = build_optimizer(linear, CONFIG.model_copy(update={"moments": moments}))
    stepped(optimizer, [linear.weight], steps=1)
    state = [x for x in optimizer.state[linear.weight].values() if x.dim()]
    assert sum(x.nbytes for x in state) == moment_bytes(moments, 4) * linear.weight.numel()


def trained(engine: ArchonEngine, steps: int) -> dict[str, Tensor]:
    for _ in range(steps):
        engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    return {name: local_tensor(p.detach()).clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_a_resumed_run_is_bitwise_the_other(moments: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16, parameters and moments are DTensors."""
    options = {"hf": WIDE, "dtype": dtype, "optimizer": {"lr": 1e-2, "moments": moments}}
    engine = make_engine(tmp_path, **options)
    trained(engine, 2)
    assert isinstance(engine.optimizer, LowBitAdamW)
    matrix = engine.optimizer.state[engine.full_model.layers["0"].feed_forward.w1.weight]
    assert matrix["exp_avg"].dtype == (torch.bfloat16 if moments == "bfloat16" else torch.uint8)
    save_state(tmp_path / "state", 2, engine.state_dict())
    again, saved = make_engine(tmp_path, **options), load_latest(tmp_path / "state")
    assert saved is not None
    again.load_state_dict(saved[1])
    expected = trained(engine, 2)
    for name, weight in trained(again, 2).items():
        assert weight.equal(expected[name]), name


def test_moments_of_another_format_are_refused(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hf=WIDE, optimizer={"lr": 1e-2})
    trained(engine, 1)
    other = make_engine(tmp_path, hf=WIDE, optimizer={"lr": 1e-2, "moments": "bfloat16"})
    with pytest.raises(
        CheckpointError, match=r"float32 .* expected exp_avg bfloat16 .*was optimizer.kind or optimizer.moments changed"
    ):
        other.load_state_dict(engine.state_dict())
