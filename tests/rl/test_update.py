"""One policy update: the objective through the real engine, and what must not change it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine import ArchonEngine
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.types import concat_padded_tensors
from archon.rl.update import PolicyUpdate
from archon.schema.config import EngineConfig
from tests.tolerances import INVARIANCE_FP64

ALGORITHM = {"kl_coef": 0.1, "entropy_coef": 0.01, "clip_eps_low": 0.05, "clip_eps_high": 0.05}


@pytest.fixture
def make_engine(blank: Path) -> Callable[..., ArchonEngine]:
    def make(**changes: Any) -> ArchonEngine:
        optimizer = {"lr": 1e-3, "max_grad_norm": None}
        config = {"path": str(blank), "init_from_scratch": True, "dtype": "float64", "optimizer": optimizer}
        engine = ArchonEngine(EngineConfig.parse(config | changes))
        engine.initialize()
        return engine

    return make


def engine_like(engine: ArchonEngine, **changes: Any) -> ArchonEngine:
    torch.manual_seed(0)
    other = ArchonEngine(engine.config.model_copy(update=changes))
    other.initialize()
    return other


def trajectories(seed: int = 0, n: int = 9) -> dict[str, Tensor]:
    """n answers of odd lengths to three prompts, with logprobs that are near the policy's but not its own."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        prompt, answer = 3 + i % 3, 1 + (5 * i) % 7
        size = prompt + answer
        mask = torch.tensor([[0] * prompt + [1] * answer])
        rows.append(
            {
                "input_ids": torch.randint(3, 15, (1, size), generator=generator),
                "attention_mask": torch.ones(1, size, dtype=torch.bool),
                "loss_mask": mask,
                "logprobs": -2.5 * torch.rand(1, size, generator=generator, dtype=torch.float64) * mask,
                "rewards": torch.rand(1, generator=generator, dtype=torch.float64),
            }
        )
    return concat_padded_tensors(rows) | {"group_ids": torch.arange(n) % 3}


def gradients_of_one_update(
    engine: ArchonEngine, batch: dict[str, Tensor], **algorithm: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of one update, and every parameter's gradient as the optimiser saw it."""
    config = AlgorithmConfig.parse(ALGORITHM | algorithm)
    critic = engine_like(engine, is_critic=True) if config.advantage == "gae" else None
    update = PolicyUpdate(engine, engine, config, critic=critic, temperature=0.8, max_new_tokens=6)
    seen: dict[str, Tensor] = {}

    def record(*_: Any) -> None:
        seen.update({name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None})

    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(record)
    prepared, measured = update.prepare(batch, step=0)
    return measured | update.train(prepared, step=0), seen


def assert_same(actual: tuple[dict[str, float], dict[str, Tensor]], expected: Any) -> None:
    for name in ("loss", "policy_loss", "kl_ref", "entropy", "approx_kl", "clip_fraction", "grad_norm"):
        assert actual[0][name] == pytest.approx(expected[0][name], rel=INVARIANCE_FP64, abs=INVARIANCE_FP64), name
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        difference = (actual[1][name] - gradient).abs().max() / gradient.abs().max()
        assert difference < INVARIANCE_FP64, name


VARIANTS: list[dict[str, Any]] = [
    *({"aggregation": kind} for kind in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")),
    {"aggregation": "dr_grpo", "advantage": "dr_grpo", "length_budget": 8},
    {"policy_loss": "gspo"},
    {"policy_loss": "cispo", "advantage": "opmd"},
    {"policy_loss": "sapo", "advantage": "reinforce_baseline"},
    {"policy_loss": "m2po", "m2_threshold": 0.3},
    {"policy_loss": "decoupled", "correction": "tis", "correction_high": 1.1},
    {"policy_loss": "reinforce", "advantage": "rloo", "kl_in": "reward", "kl_kind": "k1"},
    {"advantage": "reinforce_pp", "kl_in": "reward", "overlong_penalty": 1.0, "overlong_buffer": 0.5},
    {"advantage": "gae", "value_clip": 0.1, "correction": "icepop"},
    {"correction": "sequence_tis"},
]


@pytest.mark.parametrize("algorithm", VARIANTS, ids=["-".join(map(str, of.values())) for of in VARIANTS])
def test_loss_and_gradients_do_not_change_under_padding_packing_and_micro_batch_split(
    make_engine: Callable[..., ArchonEngine], algorithm: dict[str, Any]
) -> None:
    batch = trajectories()
    expected = gradients_of_one_update(make_engine(), batch, **algorithm)
    if algorithm.get("policy_loss", "ppo") in ("ppo", "gspo", "cispo") and "correction" not in algorithm:
        assert expected[0]["clip_fraction"] > 0

    padded = {
        name: torch.nn.functional.pad(value, (0, 5)) if value.ndim == 2 else value for name, value in batch.items()
    }
    assert_same(gradients_of_one_update(make_engine(), padded, **algorithm), expected)

    split = gradients_of_one_update(make_engine(max_tokens_per_mb=14), batch, **algorithm)
    assert split[0]["micro_batches"] > 3
    assert_same(split, expected)

    order = torch.randperm(len(batch["rewards"]), generator=torch.Generator().manual_seed(1))
    turned = {name: value[order] for name, value in batch.items()}
    assert_same(gradients_of_one_update(make_engine(), turned, **algorithm), expected)


def test_gradient_is_that_of_the_objective_written_out(make_engine: Callable[..., ArchonEngine]) -> None:
    """GRPO's equation on padded tensors, one answer at a time, with autograd through plain logits."""
    batch, engine = trajectories(), make_engine()
    _, actual = gradients_of_one_update(engine, batch)
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
        difference = (actual[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert difference < INVARIANCE_FP64, name


def plain_logprobs(
    engine: ArchonEngine, batch: dict[str, Tensor], row: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of one answer's trained tokens, from whole logits."""
    tokens = batch["input_ids"][row][batch["attention_mask"][row]]
    n = len(tokens)
    logits = engine.model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n) / temperature
    trained = (batch["loss_mask"][row][:n] == 1).nonzero().flatten()
    log_p = logits.log_softmax(-1)[trained - 1]
    return log_p.gather(1, tokens[trained].unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def test_minibatches_use_every_trajectory_once_an_epoch(make_engine: Callable[..., ArchonEngine]) -> None:
    engine, batch = make_engine(), trajectories()
    seen: list[list[int]] = []
    train_batch = engine.train_batch

    def record(minibatch: Any, *arguments: Any) -> dict[str, float]:
        seen.append([batch["input_ids"].tolist().index(row) for row in minibatch["input_ids"].tolist()])
        return train_batch(minibatch, *arguments)

    engine.train_batch = record  # type: ignore[method-assign]
    algorithm = AlgorithmConfig(kl_coef=0, ppo_epochs=2, minibatches=3)
    update = PolicyUpdate(engine, None, algorithm, temperature=1.0, seed=5)
    metrics = update.train(update.prepare(batch, 0)[0], step=0)
    assert engine.step == 6
    assert [len(rows) for rows in seen] == [3] * 6
    assert sorted(chain(*seen[:3])) == sorted(chain(*seen[3:])) == list(range(9))
    assert seen[:3] != seen[3:]
    assert metrics["ratio"] != 1.0


def test_shuffled_rewards_control_permutes_the_batch_and_nothing_else() -> None:
    batch = trajectories(n=24)
    arguments: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    engine: Any = None  # advantages need no model
    plain = PolicyUpdate(engine, None, AlgorithmConfig(kl_coef=0), **arguments)
    control = PolicyUpdate(engine, None, AlgorithmConfig(kl_coef=0), shuffle_rewards=True, **arguments)

    def advantages(update: PolicyUpdate, step: int) -> Tensor:
        found = update.prepare(batch, step)[0]["advantages"]
        return (found.sum(1) / batch["loss_mask"].sum(1)).double()

    shuffled = advantages(control, 1)
    assert shuffled.equal(advantages(control, 1))
    assert not shuffled.equal(advantages(control, 2))
    assert not shuffled.equal(advantages(plain, 1))
    for group in range(3):
        assert abs(shuffled[batch["group_ids"] == group].sum()) < INVARIANCE_FP64
