"""One policy update: the objective through the real engine, and what must not change it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine.batch import pack
from archon.engine.engine import ArchonEngine
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.update import PolicyUpdate
from tests.rl.formulas import plain_logprobs
from tests.rl.objectives import ALGORITHM, OBJECTIVES, assert_same, float64_engine, of_objective, padded, trajectories
from tests.tolerances import INVARIANCE_FP64


@pytest.fixture
def make_engine(blank: Path) -> Callable[..., ArchonEngine]:
    return lambda **changes: float64_engine(str(blank), **changes)


@dataclass
class Engines:
    """Policy and critic, and the same with micro-batches of about one document."""

    whole: tuple[ArchonEngine, ArchonEngine]
    split: tuple[ArchonEngine, ArchonEngine]


@pytest.fixture(scope="module")
def engines(blank: Path) -> Engines:
    def pair(**changes: Any) -> tuple[ArchonEngine, ArchonEngine]:
        return float64_engine(str(blank), **changes), float64_engine(str(blank), is_critic=True, **changes)

    return Engines(pair(), pair(max_tokens_per_mb=14))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_do_not_change_under_padding_packing_and_micro_batch_split(
    engines: Engines, objective: str
) -> None:
    batch, algorithm = trajectories(), OBJECTIVES[objective]
    expected = of_objective(*engines.whole, batch, algorithm)
    loss = AlgorithmConfig.parse(ALGORITHM | algorithm).policy_loss.kind
    if loss in ("ppo", "gspo", "cispo") and "correction" not in algorithm:
        assert expected[0]["clip_fraction"] > 0
    assert any(name.startswith("critic.") for name in expected[1]) == (algorithm.get("advantage") == "gae")

    assert_same(of_objective(*engines.whole, padded(batch), algorithm), expected)

    split = of_objective(*engines.split, batch, algorithm)
    assert split[0]["micro_batches"] > 3
    assert_same(split, expected)

    order = torch.randperm(len(batch["rewards"]), generator=torch.Generator().manual_seed(1))
    turned = {name: value[order] for name, value in batch.items()}
    assert_same(of_objective(*engines.whole, turned, algorithm), expected)


def test_gradient_is_that_of_the_objective_written_out(make_engine: Callable[..., ArchonEngine]) -> None:
    """GRPO's equation on padded tensors, one answer at a time, with autograd through plain logits."""
    batch, engine = trajectories(), make_engine()
    _, actual = of_objective(engine, engine, batch, {})
    fresh = make_engine()
    with torch.no_grad():
        reference = [plain_logprobs(fresh, batch, row, 0.8)[0] for row in range(9)]
    total = torch.zeros((), dtype=torch.float64)
    for row in range(9):
        logprobs, entropy = plain_logprobs(fresh, batch, row, 0.8)
        members = batch["rewards"][batch["group_ids"] == batch["group_ids"][row]]
        advantage = (batch["rewards"][row] - members.mean()) / (members.std() + 1e-6)
        ratio = (logprobs - batch["logprobs"][row][batch["loss_mask"][row] == 1]).exp()
        policy = -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.95, 1.05))
        d = logprobs - reference[row]
        total = total + (policy + 0.1 * ((-d).exp() - 1 + d) - 0.01 * entropy).mean() / 9
    total.backward()
    for name, parameter in fresh.model.named_parameters():
        assert parameter.grad is not None
        difference = (actual[f"policy.{name}"] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert difference < INVARIANCE_FP64, name


def minibatches_seen(engine: ArchonEngine, batch: dict[str, Tensor]) -> list[list[int]]:
    """A list that fills up with the rows of each minibatch that the engine is given."""
    seen: list[list[int]] = []
    train_batch = engine.train_batch
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    documents = [row[mask.bool()].tolist() for row, mask in rows]

    def record(minibatch: Any, *arguments: Any) -> dict[str, float]:
        seen.append([documents.index(tokens.tolist()) for tokens in minibatch.tokens.split(minibatch.lengths)])
        return train_batch(minibatch, *arguments)

    engine.train_batch = record  # type: ignore[method-assign]
    return seen


def test_minibatches_use_every_trajectory_once_an_epoch(make_engine: Callable[..., ArchonEngine]) -> None:
    engine, batch = make_engine(), trajectories()
    seen = minibatches_seen(engine, batch)
    algorithm = AlgorithmConfig.parse({"kl": {"coef": 0}, "ppo_epochs": 2, "minibatches": 3})
    update = PolicyUpdate(engine, None, algorithm, temperature=1.0, seed=5)
    metrics = update.train(update.prepare(batch, 0)[0], step=0)
    assert engine.step == 6
    assert [len(rows) for rows in seen] == [3] * 6
    assert sorted(chain(*seen[:3])) == sorted(chain(*seen[3:])) == list(range(9))
    assert seen[:3] != seen[3:]
    assert metrics["ratio"] != 1.0


def test_minibatches_are_dealt_anew_in_every_step_and_alike_in_a_repeated_one(
    make_engine: Callable[..., ArchonEngine],
) -> None:
    engine, batch = make_engine(), trajectories()
    seen = minibatches_seen(engine, batch)
    update = PolicyUpdate(
        engine, None, AlgorithmConfig.parse({"kl": {"coef": 0}, "minibatches": 3}), temperature=1.0, seed=5
    )
    prepared = update.prepare(batch, 0)[0]
    for step in (0, 1, 0):
        update.train(prepared, step=step)
    assert seen[:3] != seen[3:6]
    assert seen[:3] == seen[6:]


def test_shuffled_rewards_control_permutes_the_batch_and_nothing_else() -> None:
    batch = trajectories(n=24)
    arguments: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    engine: Any = None  # advantages need no model
    algorithm = AlgorithmConfig.parse({"kl": {"coef": 0}})
    plain = PolicyUpdate(engine, None, algorithm, **arguments)
    control = PolicyUpdate(engine, None, algorithm, shuffle_rewards=True, **arguments)

    def advantages(update: PolicyUpdate, step: int) -> Tensor:
        found = update.prepare(batch, step)[0]["advantages"]
        return (found.sum(1) / batch["loss_mask"].sum(1)).double()

    shuffled = advantages(control, 1)
    assert shuffled.equal(advantages(control, 1))
    assert not shuffled.equal(advantages(control, 2))
    assert not shuffled.equal(advantages(plain, 1))
    for group in range(3):
        assert abs(shuffled[batch["group_ids"] == group].sum()) < INVARIANCE_FP64


def test_documents_are_packed_once_for_all_models_and_optimizer_steps(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs: list[Any] = []
    monkeypatch.setattr("archon.rl.update.pack", lambda batch: packs.append(pack(batch)) or packs[-1])
    monkeypatch.setattr("archon.engine.micro_batch.pack", None)  # the engines pack nothing
    engine, critic = engines.whole
    settings = {
        "kl": {"coef": 0.1},
        "correction": {"kind": "tis", "max_ratio": 1.1},
        "advantage": {"kind": "gae"},
        "minibatches": 3,
    }
    algorithm, batch = AlgorithmConfig.parse(settings), trajectories()
    for model in engines.whole:
        monkeypatch.setattr(model, "train_batch", lambda *_: defaultdict(float, logprob_diff=0.0))
        monkeypatch.setattr(model, "step_lr_scheduler", lambda: None)
    update = PolicyUpdate(engine, engine, algorithm, critic=critic, temperature=1.0)
    update.logprob_difference(batch)
    update.train(update.prepare(batch, 0)[0], step=0)
    assert len(packs) == 1
