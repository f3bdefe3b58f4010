"""AdamW's groups, the global norm, clipping and schedules against formulas written out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.optim import (
    LRSchedule,
    build_optimizer,
    clip_gradients,
    decay_groups,
    gradient_norm,
    gradient_norms,
    learning_rate_factor,
)
from archon.schema.config import OptimizerConfig, SchedulerConfig
from archon.schema.errors import ConfigError
from tests.engine.tiny import make_engine, reference_gradients, sft_batch
from tests.tolerances import FORMULA_FP32, FORMULA_FP64, STEPS_FP64


def schedule_by_hand(kind: str, step: int, warmup: int, total: int, floor: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    if kind == "wsd":  # a quarter of 20 steps
        return 1.0 if step < 15 else floor + (1 - floor) * max(20 - step, 0) / 5
    if step >= total:
        return floor
    share = (step - warmup) / (total - warmup)
    if kind == "linear":
        return floor * share + (1 - share)
    return floor + (1 - floor) * (math.cos(math.pi * share) + 1) / 2


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "floor"), [(0, 0.0), (4, 0.1), (1, 1.0)])
def test_schedules_are_their_formulas(kind: str, warmup: int, floor: float) -> None:
    config = SchedulerConfig(kind=kind, warmup_steps=warmup, decay_steps=0.25, min_lr_ratio=floor)
    for step in range(25):
        expected = schedule_by_hand(kind, step, warmup, 20, floor)
        assert learning_rate_factor(step, 20, config) == pytest.approx(expected, abs=FORMULA_FP64)


def test_the_schedule_moves_every_group_and_comes_back_from_its_state() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    config = SchedulerConfig(kind="linear", warmup_steps=2)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.5))
    schedule = LRSchedule(optimizer, 0.5, config, 10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    for _ in range(6):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]  # half way down
    schedule.step()  # to a rate that a new schedule does not begin with
    again = build_optimizer(model, OptimizerConfig(lr=0.5))
    LRSchedule(again, 0.5, config, 10).load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.1875, 0.1875]


def test_a_decaying_schedule_needs_an_end() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig())
    with pytest.raises(ConfigError, match="cosine needs total_steps"):
        LRSchedule(optimizer, 1.0, SchedulerConfig(kind="cosine"), None)
    with pytest.raises(ConfigError, match="warmup_steps = 5 leaves none of the 5 steps"):
        LRSchedule(optimizer, 1.0, SchedulerConfig(kind="linear", warmup_steps=5), 5)
    with pytest.raises(ConfigError, match=r"warmup_steps = 0.1 needs total_steps"):
        LRSchedule(optimizer, 1.0, SchedulerConfig(warmup_steps=0.1), None)


def test_wsd_needs_an_end_and_room_for_its_decay() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig())
    with pytest.raises(ConfigError, match="wsd needs total_steps"):
        LRSchedule(optimizer, 1.0, SchedulerConfig(kind="wsd"), None)
    with pytest.raises(
        ConfigError, match=r"warmup_steps = 3 and scheduler.decay_steps = 0.8 are more than the 10 steps"
    ):
        LRSchedule(optimizer, 1.0, SchedulerConfig(kind="wsd", warmup_steps=3, decay_steps=0.8), 10)
    LRSchedule(optimizer, 1.0, SchedulerConfig(kind="wsd", warmup_steps=2, decay_steps=8), 10)
    with pytest.raises(ConfigError, match=r"decay_steps is 1.5"):
        SchedulerConfig.parse({"kind": "wsd", "decay_steps": 1.5})


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_a_share_of_warmup_steps_scales_with_the_run(kind: str) -> None:
    share, steps = (SchedulerConfig.parse({"kind": kind, "warmup_steps": warmup}) for warmup in (0.25, 5))
    assert [learning_rate_factor(step, 20, share) for step in range(20)] == [
        learning_rate_factor(step, 20, steps) for step in range(20)
    ]
    assert [learning_rate_factor(step, 4, share) for step in range(2)] == [1.0, 1.0]
    assert SchedulerConfig.parse({"warmup_steps": 0.0}).warmup_steps == 0
    for warmup in (-1, 1.5):
        with pytest.raises(ConfigError, match="warmup_steps"):
            SchedulerConfig.parse({"warmup_steps": warmup})


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False)])
def test_no_weight_decay_on_norms_biases_and_embeddings(tmp_path: Path, family: str, tied: bool) -> None:
    # Qwen2 has biases and no head_dim.
    shape = {"hidden_size": 60, "head_dim": 10} if family == "qwen2" else {}
    engine = make_engine(tmp_path, hf={"model_type": family, "tie_word_embeddings": tied, **shape})
    names = {id(p): n for n, p in engine.model.named_parameters()}
    decayed, plain = ({names[id(p)] for p in group} for group in decay_groups(engine.model))
    assert decayed | plain == set(names.values()) and not decayed & plain
    assert plain == {n for n in names.values() if "norm" in n or n.endswith("bias") or n.startswith("tok_embeddings")}
    assert ("output.weight" in decayed) is not tied
    assert any(n.endswith("bias") for n in plain) is (family == "qwen2")


def test_the_norm_of_a_large_gradient_has_all_its_digits() -> None:
    """torch sums the squares of a float32 tensor one after the other on a CPU, and loses the fourth digit here."""
    large = torch.nn.Parameter(torch.zeros(2**21))
    large.grad = torch.randn(2**21, generator=torch.Generator().manual_seed(0)) ** 3
    exact = float(large.grad.double().norm())
    assert abs(float(large.grad.norm()) / exact - 1) > 1e-5
    assert float(gradient_norm([large])) == pytest.approx(exact, rel=FORMULA_FP32)


def test_norms_of_several_lists_of_parameters_are_those_of_each() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 40_000, 7, 1)]
    for parameter in parameters[:3]:
        parameter.grad = torch.randn_like(parameter)
    owners = [parameters[:1], parameters[3:], parameters[1:]]
    expected = [gradient_norm(owners[0]), torch.zeros((), dtype=torch.float64), gradient_norm(owners[2])]
    assert torch.equal(gradient_norms(owners), torch.stack(expected))


def test_the_gradient_norm_is_that_of_the_whole_model_and_clipping_scales_to_it() -> None:
    parameters = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 5, 2)]
    for p in parameters[:2]:
        p.grad = torch.randn_like(p)
    by_hand = math.sqrt(sum(float(x) ** 2 for p in parameters[:2] for x in p.grad))
    before = [p.grad.clone() for p in parameters[:2]]

    norm = float(gradient_norm(parameters))
    assert norm == pytest.approx(by_hand, rel=FORMULA_FP64)

    clip_gradients(parameters, norm, max_norm=2 * norm)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=False))
    clip_gradients(parameters, norm, max_norm=None)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=False))
    clip_gradients(parameters, norm, max_norm=0.25)
    assert float(gradient_norm(parameters)) == pytest.approx(0.25, rel=FORMULA_FP64)
    torch.testing.assert_close(parameters[0].grad / before[0], torch.full((3,), 0.25 / norm, dtype=torch.float64))


def adamw_by_hand(value, gradient, first, second, step, lr, decay, config):  # type: ignore[no-untyped-def]
    value = value * (1 - lr * decay)
    first = config.beta1 * first + (1 - config.beta1) * gradient
    second = config.beta2 * second + (1 - config.beta2) * gradient**2
    corrected = (second / (1 - config.beta2**step)).sqrt() + config.eps
    return value - lr * first / (1 - config.beta1**step) / corrected, first, second


def test_three_clipped_adamw_steps_are_the_formula(tmp_path: Path) -> None:
    config = OptimizerConfig(lr=3e-3, weight_decay=0.3, max_grad_norm=0.2)
    schedule = SchedulerConfig(kind="linear", warmup_steps=2, min_lr_ratio=0.2)
    engine = make_engine(tmp_path, dtype="float64", optimizer=config, scheduler=schedule, total_steps=5)
    batch = sft_batch()
    docs = [row[mask] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    masks = [row[mask][1:] for row, mask in zip(batch["loss_mask"], batch["attention_mask"], strict=True)]
    units = float(sum(mask.sum() for mask in masks))
    plain = {id(p) for p in decay_groups(engine.model)[1]}
    values = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    moments = {n: (torch.zeros_like(v), torch.zeros_like(v)) for n, v in values.items()}

    for step in range(1, 4):
        loss, grads = reference_gradients(engine.model, docs, lambda i, logp, _: -(logp * masks[i]).sum(), units)
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        assert norm > 0.2  # so that clipping is part of what is tested
        lr = config.lr * schedule_by_hand("linear", step - 1, 2, 5, 0.2)
        for name, parameter in engine.model.named_parameters():
            decay = 0.0 if id(parameter) in plain else config.weight_decay
            clipped = grads[name] * (0.2 / norm)
            values[name], *moments[name] = adamw_by_hand(values[name], clipped, *moments[name], step, lr, decay, config)

        metrics = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
        engine.step_lr_scheduler()

        assert metrics["loss"] == pytest.approx(loss, rel=FORMULA_FP64)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=STEPS_FP64)
        assert metrics["lr"] == pytest.approx(lr, rel=FORMULA_FP64)
        for name, parameter in engine.model.named_parameters():
            torch.testing.assert_close(parameter.detach(), values[name], rtol=0, atol=STEPS_FP64, msg=name)
