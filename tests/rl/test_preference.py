"""Losses of pairs and reward models: values, gradients through the engine, learning and resuming."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

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
from archon.training.preference import PreferenceTrainer
from archon.training.preference_kinds import PairLoss
from archon.training.preference_losses import log1mexp, preference_loss
from tests.rl.conftest import small_run
from tests.rl.failed_update import require_no_checkpoint_of_a_failed_update
from tests.rl.objectives import PAIR_LOSSES, PREFERENCES, assert_same, of_preference, opened, write_pairs
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
    # c − r = 2 and 0. DPO, β = 0.5: −log σ(1) = 0.313262, log 2. IPO, β = 0.5: (m − 1)²: 1 and 1. CPO is DPO without a
    # reference. SimPO, γ = 1: −log σ(0) = log 2, −log σ(−1) = 1.313262. Reward: −log σ(2) = 0.126928, log 2; with
    # margins 2 and −2: log 2, −log σ(2).
    # ORPO, β = 0.5, probabilities e^−0.5 and e^−2.5: log odds −0.5 − log(1 − 0.606531) = 0.432752 and −2.5 − log(1 −
    # 0.082085) = −2.414350: 0.5 · −log σ(2.847102) = 0.028196. The second pair: equal, 0.5 log 2.
    chosen, rejected = torch.tensor([[-0.5, -1.0], [-2.5, -1.0]], dtype=torch.float64)
    margin = torch.tensor([2.0, -2.0], dtype=torch.float64)
    log2 = math.log(2)
    expected: dict[Any, list[float]] = {
        "dpo": [0.313262, log2],
        "cpo": [0.313262, log2],
        "ipo": [1.0, 1.0],
        "simpo": [log2, 1.313262],
        "orpo": [0.028196, log2 / 2],
        "reward": [0.126928, log2],
    }
    assert set(expected) == set(get_args(PairLoss))
    for kind, losses in expected.items():
        found = preference_loss(chosen, rejected, kind, 0.5, gamma=1.0)
        torch.testing.assert_close(found, torch.tensor(losses, dtype=torch.float64), rtol=0, atol=1e-6)
    found = preference_loss(chosen, rejected, "reward", 0.5, margin=margin)
    torch.testing.assert_close(found, torch.tensor([log2, 0.126928], dtype=torch.float64), rtol=0, atol=1e-6)


def test_log1mexp_is_exact_at_both_ends_and_has_finite_gradients() -> None:
    x = torch.tensor([-1e-20, -1e-12, -0.1, -0.693, -0.694, -5.0, -800.0], dtype=torch.float64, requires_grad=True)
    found = log1mexp(x)
    floor = torch.finfo(torch.float64).eps
    expected = [math.log(-math.expm1(min(value, -floor))) for value in x.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=FORMULA_FP64, atol=0)
    found.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def plain_number(engine: ArchonEngine, batch: dict[str, Tensor], row: int) -> Tensor:
    """One answer's log-probability from whole logits, or its score, one document at a time."""
    tokens = batch["input_ids"][row][batch["attention_mask"][row]]
    n = len(tokens)
    out = engine.model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
    trained = (batch["answer_mask"][row][:n] == 1).nonzero().flatten()
    if engine.config.is_critic:
        found: Tensor = out.reshape(n)[trained - 1].sum()
        return found
    return out.log_softmax(-1)[trained - 1].gather(1, tokens[trained].unsqueeze(1)).sum()


def plain_logprobs_at(engine: ArchonEngine, batch: dict[str, Tensor], row: int, places: Tensor) -> Tensor:
    """Log-probabilities of the tokens of one document at these places."""
    tokens = batch["input_ids"][row][batch["attention_mask"][row]]
    n = len(tokens)
    out = engine.model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
    return out.log_softmax(-1)[places - 1].gather(1, tokens[places].unsqueeze(1)).squeeze(1)


def plain_preference(chosen: Tensor, rejected: Tensor, kind: str, beta: float, gamma: float) -> Tensor:
    """Of one pair, as its paper writes it."""
    if kind == "ipo":
        return (chosen - rejected - 1 / (2 * beta)) ** 2
    if kind == "orpo":
        odds = [x.exp() / (1 - x.exp()) for x in (chosen, rejected)]
        return beta * (1 + odds[1] / odds[0]).log()
    scale, shift = {"reward": (1.0, 0.0), "simpo": (beta, gamma)}.get(kind, (beta, 0.0))
    return (1 + (shift - scale * (chosen - rejected)).exp()).log()


def test_reward_model_scores_the_last_token_of_each_answer(make: MakeConfig) -> None:
    """The reference runs the model on the rows themselves, one document at a time."""
    config = make(loss="reward")
    config.model.dtype = "float64"
    trainer = opened(config)
    rows = trainer.loader.next_batch()
    scores = trainer._answers(trainer._pairs(rows)).values.view(-1, 2)
    for row, pair in zip(rows, scores, strict=True):
        for side, score in zip(("chosen", "rejected"), pair, strict=True):
            tokens = torch.tensor(row[f"{side}_ids"])
            n = len(tokens)
            values = trainer.engine.model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
            torch.testing.assert_close(score, values.flatten()[-1].detach(), rtol=INVARIANCE_FP64, atol=INVARIANCE_FP64)


@pytest.mark.parametrize("max_tokens_per_mb", [8192, 12])
@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_gradient_is_that_of_the_loss_written_out(make: MakeConfig, loss: str, max_tokens_per_mb: int) -> None:
    """One pair at a time with autograd through plain logits; the engine's micro-batches tear pairs apart."""
    changes = {"gamma": 0.3} if loss == "simpo" else {}
    changes |= {"nll_coef": 0.7} if loss in ("dpo", "cpo") else {}
    config = make(loss=loss, beta=0.4, **changes)
    config.model.dtype, config.model.max_tokens_per_mb = "float64", max_tokens_per_mb  # the reference is as the model
    torch.manual_seed(1)
    trainer = opened(config)
    rows = trainer.loader.next_batch()
    trainer.loader.load_state_dict(trainer.loader.state_dict() | {"cursor": 0})
    batch = trainer._pairs(rows)
    model = trainer.engine.model
    total, nll, n_tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for pair in range(len(rows)):
        numbers = []
        for row in (2 * pair, 2 * pair + 1):
            number = plain_number(trainer.engine, batch, row)
            if trainer.reference is not None:
                number = number - plain_number(trainer.reference, batch, row).detach()
            mean = loss in ("simpo", "orpo")
            numbers.append(number / int(batch["answer_mask"][row].sum()) if mean else number)
        total = total + plain_preference(*numbers, loss, 0.4, 0.3) / len(rows)
        if loss in ("orpo", "cpo", "dpo"):
            # ORPO counts the prompt too, without its first token.
            counted = torch.arange(1, int(batch["attention_mask"][2 * pair].sum()))
            answer = batch["answer_mask"][2 * pair].nonzero().flatten()
            logprobs = plain_logprobs_at(trainer.engine, batch, 2 * pair, counted if loss == "orpo" else answer)
            nll, n_tokens = nll - logprobs.sum(), n_tokens + len(logprobs)
    if n_tokens:
        total = total + (1.0 if loss == "orpo" else 0.7) * nll / n_tokens
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
    assert split[0]["micro_batches"] > (3 if loss == "kto" else 9)  # a pair is two documents
    assert_same(split, expected)


@pytest.mark.parametrize("loss", ["dpo", "cpo", "simpo", "orpo", "reward"])
def test_it_learns_which_answer_is_preferred(make: MakeConfig, tmp_path: Path, loss: str) -> None:
    config = make(loss=loss, total_steps=70, eval_every=0)
    metrics = PreferenceTrainer(config).train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics["eval/accuracy"] > 0.8
    assert metrics["eval/loss"] < (0.5 if loss in ("dpo", "reward") else 0.9) * rows[0]["loss"]
    if loss == "dpo":
        assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # policy and reference are the same
    exported = load_model(tmp_path / "run" / "export", is_critic=loss == "reward")
    assert (exported.score is not None) == (loss == "reward")


def test_defaults_are_those_of_the_papers(make: MakeConfig) -> None:
    found = {
        loss: (config.resolved_beta, config.resolved_nll_coef)
        for loss in ("dpo", "ipo", "cpo", "simpo", "orpo")
        for config in (make(loss=loss),)
    }
    assert found == {"dpo": (0.1, 0), "ipo": (0.1, 0), "cpo": (0.1, 1), "simpo": (2.0, 0), "orpo": (0.1, 1)}
    assert make(loss="simpo").resolved_gamma == 0.5


def test_margins_of_pairs_are_taken_off_in_the_loss_of_a_reward_model(make: MakeConfig, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["margin"] = number % 3 - 0.5
    write_jsonl(tmp_path / "train.jsonl", lines)
    config = make(loss="reward", eval_data=None)
    config.model.dtype = "float64"
    trainer = opened(config)
    rows = trainer.loader.next_batch()
    assert {row["margin"] for row in rows} == {-0.5, 0.5, 1.5}
    answers = trainer._answers(trainer._pairs(rows))
    differences = (answers.values[::2] - answers.values[1::2]).tolist()
    losses = [math.log(1 + math.exp(row["margin"] - d)) for row, d in zip(rows, differences, strict=True)]
    assert trainer._measure(answers, rows)[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=FORMULA_FP64)
    assert "margin" not in opened(make(loss="dpo", eval_data=None)).loader.next_batch()[0]

    for wrong, shown in ((None, "None"), ("1", "'1'"), (math.nan, "nan"), (True, "True")):
        lines[3]["margin"] = wrong
        write_jsonl(tmp_path / "train.jsonl", lines)
        with pytest.raises(DatasetError, match=rf"train\.jsonl:4: 'margin' is {shown}, expected a finite number"):
            opened(config)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_evaluation_is_the_mean_over_pairs_whatever_the_batch_size(make: MakeConfig) -> None:
    """There are 18 held-out pairs, so the last batch of 7 or 16 is shorter than the others."""
    for loss in ("reward", "orpo"):
        measured = [opened(make(loss=loss, batch_size=size)).evaluate() for size in (7, 16, 18)]
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
    for loss in ("reward", "cpo", "simpo", "orpo"):
        with pytest.raises(ConfigError, match=f"loss {loss} needs no reference model; remove `ref`"):
            make(loss=loss, ref={"path": "x"})
    with pytest.raises(ConfigError, match=r"gamma is 0\.3, which only loss simpo uses, but loss is cpo; remove it"):
        make(loss="cpo", gamma=0.3)
    with pytest.raises(ConfigError, match=r"nll_coef is 0\.3, but a reward model has no likelihood; remove it"):
        make(loss="reward", nll_coef=0.3)
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
    chosen = trainer._answers(batch).values[::2]
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
