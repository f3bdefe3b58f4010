"""Workflows written step by step: what each step's answers are rewarded with."""

from __future__ import annotations

import pytest

from archon.rl import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    Experience,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
)
from archon.schema.errors import ConfigError
from tests.rl.compat.trinity.conftest import GCONFIG

ASKED = [{"role": "user", "content": "1+1="}]


class ByStep(StepWiseRewardWorkflow):
    max_step_num = 4

    def step(self, step_num: int) -> bool:
        self.model.chat(ASKED, n=step_num + 1)
        return step_num < 1

    def reward(self, exps: list[Experience], step_num: int) -> float:
        assert all(exp.eid.step == step_num for exp in exps)
        return 10.0 * step_num + len(exps)


class AsyncByStep(AsyncStepWiseRewardWorkflow):
    max_step_num = 4

    async def step_async(self, step_num: int) -> bool:
        await self.model.chat_async(ASKED, n=step_num + 1)
        return step_num < 1

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        return 10.0 * step_num + len(exps)


class AtTheEnd(RewardPropagationWorkflow):
    max_step_num = 2

    def step(self, step_num: int) -> bool:
        self.model.chat(ASKED)
        return True

    def reward(self, exps: list[Experience]) -> float:
        return float(len(exps))


class AsyncAtTheEnd(AsyncRewardPropagationWorkflow):
    max_step_num = 2

    async def step_async(self, step_num: int) -> bool:
        await self.model.chat_async(ASKED)
        return True

    async def reward_async(self, exps: list[Experience]) -> float:
        return float(len(exps))


@pytest.mark.parametrize(
    ("workflow", "rewards"),
    [(kind, [1.0, 12.0, 12.0]) for kind in (ByStep, AsyncByStep)]
    + [(k, [2.0, 2.0]) for k in (AtTheEnd, AsyncAtTheEnd)],
)
def test_every_answer_has_its_steps_reward_or_the_runs(adapted, run_episode, workflow, rewards) -> None:
    result, _ = run_episode(adapted(workflow, enable_history=True, gconfig=GCONFIG.new(n_samples=2)))
    assert result["rewards"].tolist() == rewards * 2
    assert result["trajectory_ids"].tolist() == [0] * len(rewards) + [1] * len(rewards)


def test_without_a_history_there_are_no_steps_to_reward(adapted, run_episode) -> None:
    with pytest.raises(ConfigError, match=r"set explorer\.rollout_model\.enable_history: true"):
        run_episode(adapted(ByStep))
