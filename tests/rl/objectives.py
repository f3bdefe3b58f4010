"""Every objective that can be trained, the same trajectories and pairs for each, and the gradients it gives.

An engine's optimizer steps are seen and undone here, so that one engine serves for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.rl import PreferenceConfig
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.losses import POLICY_LOSSES
from archon.rl.config import EnvironmentConfig
from archon.rl.environment_update import ENVIRONMENT_IDS, EnvironmentUpdate
from archon.rl.trajectories import concat_padded_tensors
from archon.rl.update import PolicyUpdate
from archon.schema.config import EngineConfig
from archon.training.preference import PreferenceTrainer
from tests.engine.tiny import full_tensor
from tests.tolerances import INVARIANCE_FP64

KL = {"coef": 0.1}
CLIP = {"clip_low": 0.05, "clip_high": 0.05}
ALGORITHM: dict[str, Any] = {"preset": "grpo", "kl": KL, "entropy_coef": 0.01, "policy_loss": CLIP}
LOSSES: dict[str, dict[str, Any]] = {name: {"kind": name} for name in POLICY_LOSSES}
LOSSES |= {name: {"kind": name, **CLIP} for name in ("ppo", "decoupled", "gspo", "cispo")}
LOSSES["dppo"] = {"kind": "dppo", "delta_low": 0.01, "delta_high": 0.01}
LOSSES["opsm"] = {"kind": "opsm", "max_drift": 0.1, **CLIP}
LOSSES["clip_cov"] = {"kind": "clip_cov", "fraction": 0.2, "min_covariance": 0.05, "max_covariance": 5.0}
LOSSES["kl_cov"] = {"kind": "kl_cov", "fraction": 0.2, "coef": 0.5}
LOSSES["m2po"] = {"kind": "m2po", "max_second_moment": 0.3}
AVERAGES: dict[str, dict[str, Any]] = {name: {"kind": name} for name in AGGREGATIONS}
AVERAGES["dr_grpo"] = {"kind": "dr_grpo", "max_tokens": 8}
NEEDED: dict[str, dict[str, Any]] = {"decoupled": {"correction": {"kind": "tis", "max_ratio": 1.1}}}
OTHERS: dict[str, dict[str, Any]] = {
    "dr_grpo-dr_grpo": {"aggregation": AVERAGES["dr_grpo"], "advantage": "dr_grpo"},
    "cispo-opmd": {"policy_loss": LOSSES["cispo"], "advantage": "opmd"},
    "sapo-reinforce_baseline": {"policy_loss": "sapo", "advantage": "reinforce_baseline"},
    "reinforce-rloo-reward-k1": {
        "policy_loss": "reinforce",
        "advantage": "rloo",
        "kl": {**KL, "place": "reward", "kind": "k1"},
    },
    "reinforce_pp-reward-1.0-0.5": {
        "advantage": "reinforce_pp",
        "kl": {**KL, "place": "reward"},
        "overlong": {"penalty": 1.0, "buffer": 0.5},
    },
    "gae-0.1-icepop": {"advantage": "gae", "value_clip": 0.1, "correction": "icepop"},
    "gae-sequence_tis": {"advantage": "gae", "correction": "sequence_tis"},
    "topr-reward": {"policy_loss": "topr", "advantage": "reward", "rewards": {"bias": -0.5}},
    "sppo-lite_ppo-kpop": {"policy_loss": "sppo", "advantage": "lite_ppo", "correction": "kpop"},
    "dppo-maxrl-sequence_mask": {
        "policy_loss": {"kind": "dppo", "divergence": "kl", "delta_low": 0.01, "delta_high": 0.01},
        "advantage": "maxrl",
        "correction": "sequence_mask",
    },
    "opsm-geometric_mask": {
        "policy_loss": LOSSES["opsm"],
        "correction": {"kind": "geometric_mask", "min_ratio": 0.5, "max_ratio": 2.0},
    },
    "ppo-k3_mask": {"correction": {"kind": "k3_mask", "max_divergence": 0.5}},
    "ppo-gdpo": {"advantage": {"kind": "gdpo", "weights": {"style": 0.5}}},
    "rec-asymre": {"policy_loss": "rec", "advantage": "asymre"},
    "reinforce-raft": {"policy_loss": "reinforce", "advantage": "raft", "rewards": {"bias": -0.4}},
    "ppo-step_wise_grpo": {"advantage": {"kind": "step_wise_grpo", "per_step": True}},
    "ppo-gigpo": {"advantage": "gigpo", "rewards": {"scale": 3.0, "clip": 2.0}},
    "importance-distill": {"advantage": "distill", "policy_loss": "importance"},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    f"{loss}-{aggregation}": {"policy_loss": LOSSES[loss], "aggregation": AVERAGES[aggregation], **NEEDED.get(loss, {})}
    for loss, aggregation in product(POLICY_LOSSES, AGGREGATIONS)
} | OTHERS
"""Every policy loss with every aggregation; every advantage, correction and place of the KL; `gae` with a critic."""

PREFERENCES = ("dpo", "ipo", "cpo", "simpo", "orpo", "kto", "reward")
PAIR_LOSSES = tuple(loss for loss in PREFERENCES if loss != "kto")

Found = dict[str, Tensor]
"""Numbers and gradients by name."""


def float64_engine(path: str, **changes: Any) -> ArchonEngine:
    torch.manual_seed(0)
    optimizer = {"lr": 1e-3, "max_grad_norm": None, "weight_decay": 0.0}
    config = {"path": path, "device": "cpu", "init_from_scratch": True, "dtype": "float64", "optimizer": optimizer}
    engine = ArchonEngine(EngineConfig.parse(config | changes))
    engine.initialize()
    return engine


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
    batch = concat_padded_tensors(rows) | {"group_ids": torch.arange(n) % 3}
    style = torch.rand(n, generator=generator, dtype=torch.float64)
    return batch | {"reward/right": batch["rewards"] - style, "reward/style": style}


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """With five columns more, of nothing."""
    return {name: torch.nn.functional.pad(value, (0, 5)) if value.ndim == 2 else value for name, value in batch.items()}


@contextmanager
def steps_undone(**engines: ArchonEngine | None) -> Iterator[Found]:
    """What the optimizers of these engines would have stepped on; they step on zeros, which moves nothing."""
    found: Found = {}

    def watched(role: str, engine: ArchonEngine) -> Any:
        def take(*_: Any) -> None:
            for name, parameter in engine.model.named_parameters():
                if parameter.grad is not None:
                    found[f"{role}.{name}"] = full_tensor(parameter.grad).detach().clone()
                    parameter.grad.zero_()

        assert engine.optimizer is not None
        return engine.optimizer.register_step_pre_hook(take)

    handles = [watched(role, engine) for role, engine in engines.items() if engine is not None]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def of_objective(
    engine: ArchonEngine, critic: ArchonEngine, batch: dict[str, Tensor], algorithm: dict[str, Any]
) -> tuple[dict[str, float], Found]:
    """Metrics of one update with an objective, and the gradients of all parameters."""
    config = AlgorithmConfig.parse(ALGORITHM | algorithm)
    used = critic if config.advantage.needs_critic else None

    def taught(documents: dict[str, Tensor]) -> Tensor:
        return engine.forward_batch(documents, 1.3, only_trained=True)

    teacher = taught if config.advantage.needs_teacher else None
    update = PolicyUpdate(engine, engine, config, critic=used, teacher=teacher, temperature=0.8, max_new_tokens=6)
    with steps_undone(policy=engine, critic=used) as found:
        prepared, measured = update.prepare(batch, step=0)
        if config.policy_loss.uses_demonstrations:
            given = trajectories(seed=9, n=2)
            rows = {name: given[name] for name in ("input_ids", "attention_mask", "loss_mask")}
            prepared, mixed = update.mix(prepared, rows, step=0)
            measured |= mixed
        metrics = measured | update.train(prepared, step=0)
    return metrics, found


def of_every_objective(path: str, layout: str) -> dict[str, tuple[dict[str, float], Found]]:
    engine = float64_engine(path, layout=layout)
    critic = float64_engine(path, layout=layout, is_critic=True)
    return {name: of_objective(engine, critic, trajectories(), of) for name, of in OBJECTIVES.items()}


ENVIRONMENTS: dict[str, Any] = {
    "math": {"algorithm": {"preset": "grpo", "kl": KL, "policy_loss": CLIP}, "weight": 2.0},
    "code": {
        "algorithm": {
            "preset": "dppo",
            "correction": {"kind": "tis", "max_ratio": 1.1},
            "policy_loss": {"delta_low": 0.01, "delta_high": 0.01},
        },
        "weight": 0.5,
    },
    "games": {"algorithm": {"preset": "kl_cov", "policy_loss": {"fraction": 0.2}, "minibatches": 1}},
}
"""Environments with another loss, aggregation, correction and weight each."""


def environments() -> dict[str, EnvironmentConfig]:
    return {name: EnvironmentConfig.parse(settings) for name, settings in ENVIRONMENTS.items()}


def of_environments(engine: ArchonEngine, batch: dict[str, Tensor]) -> tuple[dict[str, float], Found]:
    """Metrics of one update of several environments, one for each group, and the gradients of all parameters."""
    options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 6, "environments": environments()}
    update = EnvironmentUpdate(engine, engine, AlgorithmConfig(), **options)
    with steps_undone(policy=engine) as found:
        prepared, measured = update.prepare(batch | {ENVIRONMENT_IDS: batch["group_ids"]}, step=0)
        metrics = measured | update.train(prepared, step=0)
    return metrics, found


def of_environments_in(path: str, layout: str) -> tuple[dict[str, float], Found]:
    return of_environments(float64_engine(path, layout=layout), trajectories())


def write_pairs(folder: Path) -> None:
    """Of a digit asked for: it repeated is preferred to the next one repeated, odd lengths."""
    for split in ("train", "test"):
        numbers = [i for i in range(120) if (i % 7 == 0) == (split == "test")]
        rows = [
            {"prompt": f"{i}=", "chosen": str(i % 10) * (1 + i % 4), "rejected": str((i + 1) % 10) * (1 + i % 3)}
            for i in numbers
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(config: PreferenceConfig) -> PreferenceTrainer:
    """A trainer with its models and rows, without a run directory."""
    trainer = PreferenceTrainer(config)
    runner: Any = type("NoRun", (), {"directory": type("Nowhere", (), {"stacks": Path("stacks")})})
    trainer.runner = runner
    trainer.open()
    return trainer


def of_preference(
    path: str, pairs: str, loss: str, layout: str = "d1", max_tokens_per_mb: int = 8192, pad: bool = False
) -> tuple[dict[str, float], Found]:
    """Metrics of the first step on pairs, and the gradients of all parameters."""
    optimizer = {"lr": 1e-3, "max_grad_norm": None, "weight_decay": 0.0}
    model = {"path": path, "device": "cpu", "init_from_scratch": True, "dtype": "float64", "optimizer": optimizer}
    model |= {"layout": layout, "max_tokens_per_mb": max_tokens_per_mb, "seed": 1}
    run = {"run_dir": "unused", "total_steps": 1, "batch_size": 9, "train_data": {"path": pairs}, "loss": loss}
    if loss in ("dpo", "ipo", "kto"):
        run["ref"] = model | {"seed": 2}
    trainer = opened(PreferenceConfig.parse(run | {"model": model}))
    plain = trainer._pairs
    if pad:
        trainer._pairs = lambda rows: padded(plain(rows))  # type: ignore[method-assign]
    with steps_undone(model=trainer.engine) as found:
        metrics = trainer.train_step()
    return metrics, found


def of_every_preference(path: str, pairs: str, layout: str) -> dict[str, tuple[dict[str, float], Found]]:
    return {loss: of_preference(path, pairs, loss, layout) for loss in PREFERENCES}


CLOCKED_OR_COUNTED = ("seconds/", "micro_batches", "tokens_computed")


def assert_same(actual: tuple[dict[str, float], Found], expected: tuple[dict[str, float], Found]) -> None:
    """The numbers of an update and every gradient."""
    for name, value in expected[0].items():
        if not name.startswith(CLOCKED_OR_COUNTED):
            assert actual[0][name] == pytest.approx(value, rel=INVARIANCE_FP64, abs=INVARIANCE_FP64), name
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        difference = (actual[1][name] - gradient).abs().max() / gradient.abs().max()
        assert difference < INVARIANCE_FP64, name
