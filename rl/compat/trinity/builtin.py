"""Built-in Trinity-style workflows: one answer that is scored, and a conversation with an environment of text."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from archon.rl.compat.trinity.types import Experience, Task
from archon.rl.compat.trinity.workflow import WORKFLOWS, ModuleRegistry, Workflow
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward, RewardFailure, RewardRaised, as_reward
from archon.rl.workflows.base import kept_samples
from archon.schema.config import nearest
from archon.schema.errors import ConfigError, ContextOverflowError, RolloutError

MATH_PROMPT = r"Think step by step. State the final answer, and nothing but it, as \boxed{answer}."


@WORKFLOWS.register_module("simple_workflow")
class SimpleWorkflow(Workflow):
    """Asks the task's prompt, and scores each answer with the task's reward."""

    can_reset = True
    can_repeat = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.format_args, self.raw_task = task.format_args, task.raw_task
        self.system_prompt = task.format_args.system_prompt
        self.task_desc, self.truth = task.task_desc, task.truth
        if not isinstance(self.task_desc, str):
            raise RolloutError(
                f"{type(self).__name__}: the task has no text under prompt_key {self.format_args.prompt_key!r}; it has "
                f"{', '.join(map(repr, self.raw_task)) or 'nothing'}"
            )
        reward = task.reward_fn
        self.reward_fn = reward(**task.reward_fn_args) if isinstance(reward, type) else reward
        if not callable(self.reward_fn):
            raise ConfigError(f"{type(self).__name__} scores with the task's reward_fn, and there is none; name one")

    @property
    def rollout_args(self) -> dict[str, Any]:
        """The task's sampling values, for `model.chat(messages, **self.rollout_args)`."""
        return asdict(self.task.rollout_args) | {"n": self.repeat_times}

    def format_messages(self) -> list[dict[str, Any]]:
        """What the model is asked."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.task_desc}]

    def run(self) -> list[Experience]:
        return self.scored(self.model.chat(self.format_messages(), **self.rollout_args))

    def scored(self, responses: Sequence[Experience]) -> list[Experience]:
        """The responses with their rewards. One whose reward fails is left out and counted by kind."""
        outcomes: list[Reward | BaseException]
        if isinstance(self.reward_fn, AsyncRewardWrapper):
            outcomes = self.model.wait(self._all_scored(self.reward_fn, responses))
        else:
            outcomes = [self._score(response) for response in responses]
        kept = kept_samples(responses, outcomes)
        for response, reward in kept:
            response.reward = float(reward)
            response.metrics.update({f"reward/{name}": part for name, part in reward.parts.items()})
        return [response for response, _ in kept]

    def _score(self, response: Experience) -> Reward | BaseException:
        name = type(self.reward_fn).__qualname__
        try:
            return as_reward(self.reward_fn(response=response.response_text, truth=self.truth), name)
        except RewardFailure as failure:
            return failure
        except Exception as error:  # noqa: BLE001 (a user's code: whatever it raises costs this one sample)
            told = f"reward function {name} raised {type(error).__name__}: {error}"
            return RewardRaised(told, traceback.format_exc())

    async def _all_scored(
        self, reward_fn: AsyncRewardWrapper, responses: Sequence[Experience]
    ) -> list[Reward | BaseException]:
        row = self.raw_task if self.truth is None else self.raw_task | {"answer": str(self.truth)}

        async def one(index: int, response: Experience) -> Reward:
            workflow_context.enter_sample(index)
            ids = response.tokens.tolist()
            prompt_ids, answer_ids = ids[: response.prompt_length], ids[response.prompt_length :]
            return await reward_fn(response.prompt_text, response.response_text, prompt_ids, answer_ids, **row)

        return await asyncio.gather(*map(one, range(len(responses)), responses), return_exceptions=True)


@WORKFLOWS.register_module("math_workflow")
class MathWorkflow(SimpleWorkflow):
    """A `SimpleWorkflow` for mathematics: without a system prompt of the run's own it asks for a boxed answer."""

    def reset(self, task: Task) -> None:
        super().reset(task)
        if self.system_prompt is None:
            self.system_prompt = MATH_PROMPT


class TextEnv(Protocol):
    """An environment that is spoken with."""

    def reset(self, task: dict[str, Any]) -> str:
        """Begin the task of a row; the first observation."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """What an answer of the model brings: the next observation, a reward, whether it is over, and anything else."""
        ...


@WORKFLOWS.register_module("text_env_workflow")
class TextEnvWorkflow(Workflow):
    """A conversation with an environment; its reward is the sum of the environment's, and every answer is trained.

    `workflow_args` holds `env`, the dotted path (or the object) that makes a `TextEnv`, `env_args` for it, and
    `max_env_steps`, answers at most (10). The conversation also ends with an answer that was cut off.
    """

    can_reset = True
    can_repeat = False

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        args: dict[str, Any] = {"env": None, "env_args": {}, "max_env_steps": 10}
        for name in task.workflow_args:
            if name not in args:
                raise ConfigError(f"workflow_args of text_env_workflow: unknown {name!r}{nearest(name, list(args))}")
        args |= task.workflow_args
        env, self.max_env_steps = args["env"], int(args["max_env_steps"])
        if env is None or self.max_env_steps < 1:
            raise ConfigError(
                f"workflow_args of text_env_workflow: env is {env!r} and max_env_steps {self.max_env_steps}; expected "
                "the dotted path of an environment, and at least 1"
            )
        make: Callable[..., TextEnv] = ModuleRegistry[Any]("environment").find(env) if isinstance(env, str) else env
        self.env = make(**args["env_args"])

    def run(self) -> list[Experience]:
        prompt = self.task.format_args.system_prompt
        messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}] if prompt else []
        messages.append({"role": "user", "content": self.env.reset(self.task.raw_task)})
        sampling = asdict(self.task.rollout_args) | {"n": 1}
        total, steps, done = 0.0, 0, False
        while not done and steps < self.max_env_steps:
            try:
                (response,) = self.model.chat(messages, **sampling)
            except ContextOverflowError:
                if steps == 0:
                    raise
                break  # no room for another turn
            action = response.response_text or ""
            messages.append({"role": "assistant", "content": action})
            observation, reward, done, _ = self.env.step(action)
            total, steps = total + float(reward), steps + 1
            if response.truncate_status is not None:
                break
            messages.append({"role": "user", "content": observation})
        if messages[-1]["role"] == "user":
            messages.pop()
        return [self.process_messages_to_experience(messages, total, {"env_steps": steps, "env_done": done})]
