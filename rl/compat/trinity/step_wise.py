"""Base classes of step-by-step Trinity-style workflows, with rewards per step or per run."""

from __future__ import annotations

from archon.rl.compat.trinity.experience import Experience
from archon.rl.compat.trinity.workflow import Workflow
from archon.schema.errors import ConfigError


def _with_reward(experiences: list[Experience], reward: float) -> list[Experience]:
    for experience in experiences:
        experience.reward = reward
    return experiences


class _Steps(Workflow):
    """Workflow that calls `step` until it returns False, at most `max_step_num` times."""

    can_repeat = False

    @property
    def max_step_num(self) -> int:
        """Maximum number of steps."""
        raise NotImplementedError

    def step(self, step_num: int) -> bool:
        """Run step `step_num` (from 0); return whether there is another one."""
        raise NotImplementedError

    async def step_async(self, step_num: int) -> bool:
        """Do the same as `step`, awaited, in asynchronous classes."""
        raise NotImplementedError

    def step_experiences(self, step_num: int) -> list[Experience]:
        """Return the answers of step `step_num` as experiences, with the step in `eid.step`."""
        if not self.model.enable_history:
            raise ConfigError(
                f"{type(self).__name__} trains recorded answers; set explorer.rollout_model.enable_history: true, or "
                "workflow_args.enable_history: true"
            )
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.eid.step = step_num
        return experiences


class StepWiseRewardWorkflow(_Steps):
    """Workflow with one reward per step."""

    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of the experiences of step `step_num`."""
        raise NotImplementedError

    def run(self) -> list[Experience]:
        """Run the steps and reward each."""
        experiences: list[Experience] = []
        for number in range(self.max_step_num):
            goes_on = self.step(step_num=number)
            step_experiences = self.step_experiences(number)
            reward = self.reward(step_experiences, step_num=number)
            experiences += _with_reward(step_experiences, reward)
            if not goes_on:
                break
        return experiences


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """Asynchronous `StepWiseRewardWorkflow` with `step_async` and `reward_async`."""

    is_async = True

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Do the same as `reward`, awaited."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """Run the steps and reward each."""
        experiences: list[Experience] = []
        for number in range(self.max_step_num):
            goes_on = await self.step_async(step_num=number)
            step_experiences = self.step_experiences(number)
            reward = await self.reward_async(step_experiences, step_num=number)
            experiences += _with_reward(step_experiences, reward)
            if not goes_on:
                break
        return experiences


class RewardPropagationWorkflow(_Steps):
    """Workflow with one reward for all steps of a run."""

    def reward(self, exps: list[Experience]) -> float:
        """Return the reward of a run with these experiences."""
        raise NotImplementedError

    def run(self) -> list[Experience]:
        """Run the steps and reward them together."""
        experiences: list[Experience] = []
        for number in range(self.max_step_num):
            goes_on = self.step(step_num=number)
            experiences += self.step_experiences(number)
            if not goes_on:
                break
        return _with_reward(experiences, self.reward(experiences))


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """Asynchronous `RewardPropagationWorkflow` with `step_async` and `reward_async`."""

    is_async = True

    async def reward_async(self, exps: list[Experience]) -> float:
        """Do the same as `reward`, awaited."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """Run the steps and reward them together."""
        experiences: list[Experience] = []
        for number in range(self.max_step_num):
            goes_on = await self.step_async(step_num=number)
            experiences += self.step_experiences(number)
            if not goes_on:
                break
        return _with_reward(experiences, await self.reward_async(experiences))
