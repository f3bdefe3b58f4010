"""An agent in the trainer's loop: what it is trained on is what the trainer computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from tests.rl.agents.test_workflow import ask
from tests.tolerances import FIRST_RATIO_FP32


class Retries:
    """Answers twice; the reward is how many digits the second answer has."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        talk = [*data["messages"]]
        first = await ask(talk, given)
        talk += [first["choices"][0]["message"], {"role": "user", "content": "0+0="}]
        second = await ask(talk, given)
        return float(sum(map(str.isdigit, second["choices"][0]["message"]["content"])))


def test_first_step_importance_ratio_is_one_for_an_agent(rl_config: Callable[..., RLConfig]) -> None:
    config = rl_config(
        workflow_args={"agent": f"{__name__}.Retries"}, rollout={"prompts_per_step": 6, "gold_checked": 0}
    )
    trainer = RLTrainer(config)
    with trainer.opened("archon.rl.AgentWorkflow"):
        for step in range(3):
            batch = trainer.rollout_batch().trajectories
            trained = batch["loss_mask"] == 1
            assert batch["turn_ids"].max() == 1
            assert (batch["versions"][trained] == step).all()
            logprobs = trainer.engine.forward_batch(batch, temperature=1.0)
            assert (logprobs - batch["logprobs"])[trained].abs().max() < FIRST_RATIO_FP32
            metrics = trainer.train_step()
            assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32
            assert metrics["agent_answers"] == 2.0
            assert metrics["grad_norm"] > 0
    assert torch.isfinite(batch["logprobs"]).all()
