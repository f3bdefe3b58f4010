"""PPO: a critic alongside the policy, through the real trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.hf_io import load_model
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.errors import CheckpointError, ConfigError
from archon.training.metrics import read_jsonl

MakeConfig = Callable[..., RLConfig]

PPO: dict[str, Any] = {"preset": "ppo", "kl": {"coef": 0.0}, "minibatches": 2, "value_clip": None}


def ppo(blank: Path, **changes: Any) -> dict[str, Any]:
    critic = {"path": str(blank), "init_from_scratch": True, "optimizer": {"lr": 3e-3}}
    return {"algorithm": PPO, "critic": critic, "gconfig": {"n_samples": 1, "max_new_tokens": 4}} | changes


@pytest.mark.slow
def test_the_critic_learns_what_the_answers_will_earn(rl_config: MakeConfig, blank: Path) -> None:
    """One answer a prompt: without groups the critic alone is the baseline."""
    rollout = {"prompts_per_step": 48, "n_gold_checks": 0}
    reward = "tests.rl.rewards_for_tests.count_digits"
    config = rl_config(**ppo(blank, total_steps=60, rollout=rollout, reward=reward))
    config.actor.optimizer.lr = 1e-9  # type: ignore[union-attr]
    trainer = RLTrainer(config)
    with trainer.opened():
        rows = [trainer.train_step() for _ in range(60)]
    assert rows[-1]["value_loss"] < 0.5 * rows[0]["value_loss"]
    assert sum(row["explained_variance"] for row in rows[-5:]) / 5 > 0.2
    assert rows[0]["explained_variance"] < 0.1


def test_the_critics_learning_rate_follows_its_own_schedule(rl_config: MakeConfig, blank: Path) -> None:
    values = ppo(blank, total_steps=4, rollout={"prompts_per_step": 6, "n_gold_checks": 0})
    values["critic"] |= {"scheduler": {"kind": "linear", "warmup_steps": 2, "min_lr_ratio": 0.0}}
    trainer = RLTrainer(rl_config(**values))
    with trainer.opened():
        rows = [trainer.train_step() for _ in range(2)]
    # Of 8 optimizer steps the first two warm up by halves to 3e-3; then it falls to 0 in six.
    expected = [[1 / 2, 1.0], [1.0, 5 / 6]]
    assert [row["critic_lr"] for row in rows] == pytest.approx([3e-3 * sum(of) / 2 for of in expected])


def test_ppo_resumes_bitwise_with_its_critic(rl_config: MakeConfig, blank: Path, tmp_path: Path) -> None:
    whole = rl_config(run_dir=str(tmp_path / "whole"), **ppo(blank, total_steps=4, checkpoint={"every": 2}))
    RLTrainer(whole).train()
    halves = [
        rl_config(run_dir=str(tmp_path / "halves"), resume=True, **ppo(blank, total_steps=4, checkpoint={"every": 2}))
        for _ in range(2)
    ]
    stopped = RLTrainer(halves[0])
    step = stopped.train_step

    def two_steps() -> dict[str, float]:
        if stopped.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    stopped.train_step = two_steps  # type: ignore[method-assign]
    stopped.train()
    assert stopped.step == 1  # the rollout of the second step was cut short
    RLTrainer(halves[1]).train()
    models = [load_model(tmp_path / name / "export").parameters() for name in ("whole", "halves")]
    assert all(a.equal(b) for a, b in zip(*models, strict=True))
    values = [
        [(row["step"], row.get("value_loss")) for row in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "halves")
    ]
    assert values[0] == values[1]


def test_a_checkpoint_without_a_critic_does_not_resume_ppo(rl_config: MakeConfig, blank: Path) -> None:
    RLTrainer(rl_config(total_steps=1)).train()
    with pytest.raises(CheckpointError, match=r"the checkpoint has no critic; was algorithm\.advantage changed"):
        RLTrainer(rl_config(resume=True, **ppo(blank, total_steps=2))).train()


def test_advantage_and_critic_must_agree(rl_config: MakeConfig, blank: Path) -> None:
    alone = ppo(blank)["algorithm"] | {"zero_variance_groups": "drop"}
    with pytest.raises(ConfigError, match="drop would leave nothing: a group is one answer"):
        rl_config(**ppo(blank, algorithm=alone))
    with pytest.raises(ConfigError, match=r"algorithm\.advantage is gae, which needs a critic: set `critic`"):
        rl_config(algorithm=PPO)
    with pytest.raises(ConfigError, match=r"a critic is set, but algorithm\.advantage 'grpo' uses none"):
        rl_config(critic={"path": str(blank)})
    critic = rl_config(**ppo(blank)).resolve().critic
    assert critic is not None and critic.is_critic and critic.init_score
