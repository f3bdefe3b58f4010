"""DPO, IPO and reward models: their losses, their gradient through the engine, and that they learn and resume."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.checkpoint.hf_io import load_model
from archon.engine.engine import ArchonEngine
from archon.rl import PreferenceConfig, RLTrainer
from archon.rl.config import RLConfig
from archon.rl.rewards.reward_model import RewardModel
from archon.schema.errors import CheckpointError, ConfigError, DatasetError
from archon.training.metrics import read_jsonl
from archon.training.preference import PreferenceTrainer, preference_loss
from tests.rl.conftest import small_run
from tests.rl.failed_update import require_no_checkpoint_of_a_failed_update
from tests.rl.objectives import PREFERENCES, assert_same, of_preference, opened, write_pairs
from tests.tolerances import FORMULA_FP64, INVARIANCE_FP64

MakeConfig = Callable[..., PreferenceConfig]


@pytest.fixture
def make(blank: Path, tmp_path: Path) -> MakeConfig:
    write_pairs(tmp_path)

    def of(**changes: Any) -> PreferenceConfig:
        run = {
            "run_dir": str(tmp_path / "run"),
            "total_steps": 6,
            "batch_size": 16,
            "model": {"path": str(blank), "init_from_scratch": True, "optimizer": {"lr": 3e-3}},
            "train_data": {"path": str(tmp_path)},
            "eval_data": {"path": str(tmp_path), "split": "test"},
        }
        return PreferenceConfig.parse(run | changes)

    return of


def test_preference_losses_worked_by_hand() -> None:
    # DPO, β = 0.5: m = 2: −log σ(1) = 0.313262, derivative −0.5 σ(−1) = −0.134471; m = 0: log 2, −0.25.
    # IPO, β = 0.5: (m − 1)²: 1 and 1, derivatives 2 and −2. Reward: −log σ(2) = 0.126928, −σ(−2) = −0.119203; m = 0.
    margin = torch.tensor([2.0, 0.0], dtype=torch.float64)
    expected = {
        "dpo": ([0.313262, math.log(2)], [-0.134471, -0.25]),
        "ipo": ([1.0, 1.0], [2.0, -2.0]),
        "reward": ([0.126928, math.log(2)], [-0.119203, -0.5]),
    }
    for kind, (loss, derivative) in expected.items():
        found = preference_loss(margin, kind, 0.5)
        torch.testing.assert_close(found[0], torch.tensor(loss, dtype=torch.float64), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[1], torch.tensor(derivative, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "reward"])
def test_the_derivative_is_autograds(kind: str) -> None:
    margin = torch.linspace(-30, 30, 41, dtype=torch.float64, requires_grad=True)
    loss, derivative = preference_loss(margin, kind, 0.3)
    loss.sum().backward()
    assert margin.grad is not None
    torch.testing.assert_close(derivative.detach(), margin.grad, rtol=FORMULA_FP64, atol=FORMULA_FP64)


def plain_number(engine: ArchonEngine, batch: dict[str, Tensor], row: int) -> Tensor:
    """One answer's log-probability from whole logits, or its score, one document at a time."""
    tokens = batch["input_ids"][row][batch["attention_mask"][row]]
    n = len(tokens)
    out = engine.model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
    trained = (batch["loss_mask"][row][:n] == 1).nonzero().flatten()
    if engine.config.is_critic:
        found: Tensor = out.reshape(n)[trained - 1].sum()
        return found
    return out.log_softmax(-1)[trained - 1].gather(1, tokens[trained].unsqueeze(1)).sum()


def test_reward_model_scores_the_last_token_of_each_answer(make: MakeConfig) -> None:
    """The reference runs the model on the rows themselves, one document at a time."""
    config = make(loss="reward")
    config.model.dtype = "float64"
    trainer = opened(config)
    rows = trainer.loader.next_batch()
    scores = trainer._numbers(trainer.engine, trainer._pairs(rows)).view(-1, 2)
    for row, pair in zip(rows, scores, strict=True):
        for side, score in zip(("chosen", "rejected"), pair, strict=True):
            tokens = torch.tensor(row[f"{side}_ids"])
            n = len(tokens)
            values = trainer.engine.model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
            torch.testing.assert_close(score, values.flatten()[-1].detach(), rtol=INVARIANCE_FP64, atol=INVARIANCE_FP64)


@pytest.mark.parametrize("max_tokens_per_mb", [8192, 12])
@pytest.mark.parametrize("loss", ["dpo", "ipo", "reward"])
def test_gradient_is_that_of_the_loss_written_out(make: MakeConfig, loss: str, max_tokens_per_mb: int) -> None:
    """One pair at a time with autograd through plain logits; the engine's micro-batches tear pairs apart."""
    config = make(loss=loss, beta=0.4)
    config.model.dtype, config.model.max_tokens_per_mb = "float64", max_tokens_per_mb  # the reference is as the model
    torch.manual_seed(1)
    trainer = opened(config)
    rows = trainer.loader.next_batch()
    trainer.loader.load_state_dict(trainer.loader.state_dict() | {"cursor": 0})
    batch = trainer._pairs(rows)
    model = trainer.engine.model
    total = torch.zeros((), dtype=torch.float64)
    for pair in range(len(rows)):
        chosen, rejected = (plain_number(trainer.engine, batch, 2 * pair + i) for i in range(2))
        if trainer.reference is not None:
            chosen = chosen - plain_number(trainer.reference, batch, 2 * pair).detach()
            rejected = rejected - plain_number(trainer.reference, batch, 2 * pair + 1).detach()
        total = total + preference_loss(chosen - rejected, loss, 0.4)[0] / len(rows)
    total.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    seen: dict[str, Tensor] = {}

    def record(*_: Any) -> None:
        seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    assert trainer.engine.optimizer is not None
    trainer.engine.config.optimizer.max_grad_norm = None  # type: ignore[union-attr]
    trainer.engine.optimizer.register_step_pre_hook(record)
    metrics = trainer.train_step()
    assert metrics["loss"] == pytest.approx(total.item(), rel=INVARIANCE_FP64)
    assert (metrics["micro_batches"] > len(rows)) == (max_tokens_per_mb == 12)
    for name, gradient in expected.items():
        difference = (seen[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30)
        assert difference < INVARIANCE_FP64, name


@pytest.mark.parametrize("loss", PREFERENCES)
def test_loss_and_gradients_of_pairs_do_not_change_under_padding_packing_and_micro_batch_split(
    blank: Path, tmp_path: Path, loss: str
) -> None:
    write_pairs(tmp_path)
    expected = of_preference(str(blank), str(tmp_path), loss)
    assert_same(of_preference(str(blank), str(tmp_path), loss, pad=True), expected)
    split = of_preference(str(blank), str(tmp_path), loss, max_tokens_per_mb=12)
    assert split[0]["micro_batches"] > 9
    assert_same(split, expected)


@pytest.mark.parametrize("loss", ["dpo", "reward"])
def test_it_learns_which_answer_is_preferred(make: MakeConfig, tmp_path: Path, loss: str) -> None:
    config = make(loss=loss, total_steps=70, eval_every=0)
    metrics = PreferenceTrainer(config).train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics["eval/accuracy"] > 0.8
    assert metrics["eval/loss"] < 0.5 * rows[0]["loss"]
    if loss == "dpo":
        assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # policy and reference are the same
    exported = load_model(tmp_path / "run" / "export", is_critic=loss == "reward")
    assert (exported.score is not None) == (loss == "reward")


def test_evaluation_is_the_mean_over_pairs_whatever_the_batch_size(make: MakeConfig) -> None:
    """There are 18 held-out pairs, so the last batch of 7 or 16 is shorter than the others."""
    measured = [opened(make(loss="reward", batch_size=size)).evaluate() for size in (7, 16, 18)]
    assert measured[0] == pytest.approx(measured[2], rel=1e-5)
    assert measured[1] == pytest.approx(measured[2], rel=1e-5)


def test_policy_that_is_its_reference_prefers_no_answer(make: MakeConfig) -> None:
    measured = opened(make()).evaluate()
    assert (measured["eval/accuracy"], measured["eval/margin"]) == (0, 0)


def test_learning_rate_reaches_the_end_of_its_schedule_with_the_run(make: MakeConfig, tmp_path: Path) -> None:
    config = make(total_steps=4, loss="reward")
    config.model.scheduler.kind, config.model.scheduler.min_lr_ratio = "linear", 0.0
    PreferenceTrainer(config).train()
    rates = [row["lr"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([3e-3 * share for share in (1, 0.75, 0.5, 0.25)])


def test_error_inside_an_update_saves_no_checkpoint(make: MakeConfig, tmp_path: Path) -> None:
    trainer = PreferenceTrainer(make(checkpoint={"every": 0}))
    require_no_checkpoint_of_a_failed_update(trainer, trainer.train, tmp_path / "run" / "checkpoints")


def test_pairs_and_configuration_are_checked(make: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss reward needs no reference model; remove `ref`"):
        make(loss="reward", ref={"path": "x"})
    (tmp_path / "train.jsonl").write_text('{"prompt": "1="}\n')
    config = make()
    with pytest.raises(
        DatasetError,
        match=r"train\.jsonl:1: the columns 'prompt' belong to no known format; expected the columns chosen",
    ):
        opened(config)
    arithmetic = make(train_data={"path": "arithmetic"})
    with pytest.raises(DatasetError, match="arithmetic has no rows of kind 'dpo'; expected rl or sft"):
        opened(arithmetic)


def test_a_trained_reward_model_is_a_reward_in_rl(
    make: MakeConfig, blank: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reward of an answer is the score that training gave the same conversation, in any company."""
    trainer = PreferenceTrainer(make(loss="reward", total_steps=2, eval_data=None))
    trainer.train()
    pairs = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()][:4]
    batch = trainer._pairs([trainer.loader.rows[index] for index in range(4)])  # type: ignore[union-attr]
    chosen = trainer._numbers(trainer.engine, batch)[::2]
    export = str(tmp_path / "run" / "export")
    model = RewardModel(export).load(torch.device("cpu"), torch.float32)

    async def scores() -> list[float]:
        return await asyncio.gather(*(model(pair["prompt"], pair["chosen"], [], []) for pair in pairs))

    assert asyncio.run(scores()) == pytest.approx(chosen.tolist(), abs=1e-5)
    caplog.clear()
    assert math.isfinite(asyncio.run(model("1+1=", "", [], [])))  # an empty answer is scored like another
    assert not caplog.messages  # notes on rows are for data sets, not for each sampled answer

    run = small_run(blank, tmp_path / "rl") | {"reward": {"model": export}, "total_steps": 2}
    metrics = RLTrainer(RLConfig.parse(run)).train()
    assert metrics["reward_std"] > 0 and metrics["grad_norm"] > 0
    with pytest.raises(CheckpointError, match="score"):
        RLTrainer(
            RLConfig.parse(run | {"run_dir": str(tmp_path / "x"), "reward": {"model": str(tmp_path / "rl/export")}})
        ).train()
