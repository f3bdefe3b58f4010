"""Muon against a plain loop, torch's Muon and a singular value decomposition; what it trains, refuses and resumes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archon.checkpoint.native import load_latest, save_state
from archon.engine.muon import Muon, orthogonalize
from archon.engine.optim import LRSchedule, build_optimizer, muon_matrices
from archon.models.layers.linear import Linear
from archon.schema.config import EngineConfig, OptimizerConfig, SchedulerConfig
from archon.schema.errors import CheckpointError, ConfigError
from tests.engine.test_low_bit_adamw import stepped, trained
from tests.engine.tiny import make_engine
from tests.tolerances import FORMULA_FP64

CONFIG = OptimizerConfig(kind="muon", lr=1e-2, weight_decay=0.1, momentum=0.9)
MUON: dict[str, Any] = {"optimizer": {"kind": "muon", "lr": 1e-2}}
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def orthogonalize_by_loop(matrix: Tensor) -> Tensor:
    """Five steps on one matrix [m, n], by the polynomial of its singular values."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (32, 64), (3, 4, 6), (2, 6, 4)])
def test_singular_values_follow_the_polynomial(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = orthogonalize(x)
    expected = torch.stack([orthogonalize_by_loop(matrix) for matrix in x.view(-1, *shape[-2:])]).view(shape)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-11)  # a decomposition has its own rounding
    assert torch.linalg.svdvals(result).min() > 0.6 and torch.linalg.svdvals(result).max() < 1.2


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert orthogonalize(torch.zeros(3, 5)).equal(torch.zeros(3, 5))


@pytest.mark.parametrize("features", [(24, 40), (40, 24)])
def test_steps_equal_the_formula(features: tuple[int, int]) -> None:
    linear = Linear(*features, bias=True, role="column").double()
    weight, momentum = linear.weight.detach().clone(), torch.zeros_like(linear.weight)
    result, _ = stepped(build_optimizer(linear, CONFIG), [linear.weight, linear.bias])
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        torch.randn(linear.bias.shape, generator=generator, dtype=torch.float64)
        momentum = 0.9 * momentum + grad
        update = orthogonalize_by_loop(grad + 0.9 * momentum)
        weight = (1 - 1e-2 * 0.1) * weight - 1e-2 * 0.2 * max(features) ** 0.5 * update
    torch.testing.assert_close(result, weight, rtol=0, atol=1e-11)


def test_vectors_are_trained_by_adamw_at_the_scheduled_rate() -> None:
    biases = []
    linear = Linear(24, 40, bias=True, role="column").double()
    for kind in ("muon", "adamw"):
        layer = copy.deepcopy(linear)
        optimizer = build_optimizer(layer, CONFIG.model_copy(update={"kind": kind}))
        LRSchedule(optimizer, CONFIG.lr, SchedulerConfig(warmup_steps=4), None)  # the first rate is a quarter
        biases.append(stepped(optimizer, [layer.weight, layer.bias])[1])
    torch.testing.assert_close(*biases, rtol=0, atol=FORMULA_FP64)


def test_steps_point_where_those_of_torch_do() -> None:
    """torch computes in bfloat16, so the steps differ by its rounding."""
    linear = Linear(48, 32, bias=False, role="column")
    other, start = copy.deepcopy(linear), linear.weight.detach().clone()
    theirs = torch.optim.Muon([other.weight], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    (result,), (expected,) = stepped(build_optimizer(linear, CONFIG), [linear.weight]), stepped(theirs, [other.weight])
    similarity = torch.cosine_similarity((result - start).flatten(), (expected - start).flatten(), dim=0)
    assert similarity > 0.995
    assert float((result - start).norm() / (expected - start).norm()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("hf", [{}, {"tie_word_embeddings": True}, MOE])
def test_muon_trains_the_matrices_of_layers(tmp_path: Path, hf: dict[str, Any]) -> None:
    engine = make_engine(tmp_path, hf=hf, **MUON)
    chosen = muon_matrices(engine.model)
    names = {name for name, parameter in engine.model.named_parameters() if id(parameter) in chosen}
    every = {name for name, parameter in engine.model.named_parameters() if parameter.dim() >= 2}
    assert names == every - {"tok_embeddings.weight", "output.weight"}
    assert len(names) > 12


def test_a_resumed_run_continues_bitwise(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hf=MOE, **MUON)
    trained(engine, 2)
    assert isinstance(engine.optimizer, Muon)
    save_state(tmp_path / "state", 2, engine.state_dict())
    again, saved = make_engine(tmp_path, hf=MOE, **MUON), load_latest(tmp_path / "state")
    assert saved is not None
    again.load_state_dict(saved[1])
    expected = trained(engine, 2)
    for name, weight in trained(again, 2).items():
        assert weight.equal(expected[name]), name


def test_a_step_in_the_backward_pass_equals_a_step_after_it(tmp_path: Path) -> None:
    unclipped = {"optimizer": MUON["optimizer"] | {"max_grad_norm": None}}
    expected = trained(make_engine(tmp_path, dtype="float64", **unclipped), 2)
    engine = make_engine(tmp_path, dtype="float64", gradient_reduction="step_in_backward", **unclipped)
    for name, weight in trained(engine, 2).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=FORMULA_FP64, msg=name)


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    engine, other = make_engine(tmp_path, **MUON), make_engine(tmp_path, optimizer={"lr": 1e-2})
    trained(engine, 1)
    with pytest.raises(CheckpointError, match=r"momentum_buffer .* expected exp_avg .*was optimizer.kind"):
        other.load_state_dict(engine.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"kind": "muon", "moments": "int8"}}, "kind = muon needs moments = float32, got int8"),
        ({"optimizer": {"kind": "muon"}, "lora": {"rank": 2}}, "optimizer.kind = muon orthogonalizes"),
        (
            {"lora": {"loras": {"a": {"rank": 2, "optimizer": {"kind": "muon"}}}}},
            "optimizer.kind = muon orthogonalizes",
        ),
    ],
)
def test_what_muon_does_not_support_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.parse({"path": "model"} | changes)


def test_gradients_that_are_missing_leave_the_weight(tmp_path: Path) -> None:
    first, second = (Linear(8, 6, bias=False, role="column") for _ in range(2))
    model = nn.ModuleList([first, second])
    start = second.weight.detach().clone()
    stepped(build_optimizer(model, CONFIG), [first.weight])
    assert second.weight.equal(start)
