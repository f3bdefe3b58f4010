"""Built-in Trinity-style workflows with one answer: text and mathematics."""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from archon.rl.compat.trinity.experience import Experience
from archon.rl.compat.trinity.workflow import WORKFLOWS, Task, Workflow, parse_workflow_args
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward, RewardFailure, RewardRaised, as_reward
from archon.rl.workflows.base import drop_failed_samples
from archon.schema.errors import ConfigError, RolloutError

MATH_PROMPT = r"Think step by step. State the final answer, and nothing but it, as \boxed{answer}."
THINK_PROMPT = r"Reason between <think> and </think> first. Then state the final answer as \boxed{answer}."
_THOUGHT = re.compile(r"\s*<think>.+?</think>.+", re.DOTALL)


@WORKFLOWS.register_module("async_simple_workflow")
@WORKFLOWS.register_module("simple_workflow")
class SimpleWorkflow(Workflow):
    """Workflow that samples the task's prompt and scores each answer with the task's reward.

    Attributes:
        default_reward: reward of a configuration that names none; None requires a name.
    """

    can_reset = True
    can_repeat = True
    default_reward: ClassVar[str | None] = None

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Read the task's texts and construct its reward."""
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
            raise ConfigError(f"{type(self).__name__} needs a reward: set default_reward_fn_type or reward")

    @property
    def rollout_args(self) -> dict[str, Any]:
        """Sampling parameters for `model.chat(messages, **self.rollout_args)`."""
        return asdict(self.task.rollout_args) | {"n": self.repeat_times}

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the prompt."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.task_desc}]

    def run(self) -> list[Experience]:
        """Answer the prompt and score the answers."""
        return self.score(self.model.chat(self.format_messages(), **self.rollout_args))

    def score(self, responses: Sequence[Experience]) -> list[Experience]:
        """Return the responses with rewards; a failed reward drops its response and is counted by kind."""
        outcomes: list[Reward | BaseException]
        if isinstance(self.reward_fn, AsyncRewardWrapper):
            outcomes = self.model.wait(self._score_all(self.reward_fn, responses))
        else:
            outcomes = [self._score_one(response) for response in responses]
        kept = drop_failed_samples(responses, outcomes)
        for response, reward in kept:
            response.reward = float(reward)
            response.metrics.update({f"reward/{name}": part for name, part in reward.parts.items()})
        return [response for response, _ in kept]

    def _score_one(self, response: Experience) -> Reward | BaseException:
        name = type(self.reward_fn).__qualname__
        try:
            return as_reward(self.reward_fn(response=response.response_text, truth=self.truth), name)
        except RewardFailure as failure:
            return failure
        except Exception as error:  # noqa: BLE001 (an error in user code costs one sample)
            message = f"reward function {name} raised {type(error).__name__}: {error}"
            return RewardRaised(message, traceback.format_exc())

    async def _score_all(
        self, reward_fn: AsyncRewardWrapper, responses: Sequence[Experience]
    ) -> list[Reward | BaseException]:
        row = self.raw_task if self.truth is None else self.raw_task | {"answer": str(self.truth)}

        async def one(index: int, response: Experience) -> Reward:
            workflow_context.enter_sample(index)
            ids = response.tokens.tolist()
            prompt_ids, answer_ids = ids[: response.prompt_length], ids[response.prompt_length :]
            return await reward_fn(response.prompt_text, response.response_text, prompt_ids, answer_ids, **row)

        return await asyncio.gather(*map(one, range(len(responses)), responses), return_exceptions=True)


@WORKFLOWS.register_module("async_math_workflow")
@WORKFLOWS.register_module("math_workflow")
class MathWorkflow(SimpleWorkflow):
    """`SimpleWorkflow` for mathematics; the default system prompt asks for a boxed answer."""

    default_reward = "math_reward"

    def reset(self, task: Task) -> None:
        """Read the task and set the default system prompt."""
        super().reset(task)
        if self.system_prompt is None:
            self.system_prompt = MATH_PROMPT


@WORKFLOWS.register_module("async_math_boxed_workflow")
@WORKFLOWS.register_module("math_boxed_workflow")
class MathBoxedWorkflow(MathWorkflow):
    """`MathWorkflow` with options for thinking and base models.

    `workflow_args.with_think` (false) asks for reasoning between think tags; an answer without them loses
    `format_score_coef` (0.1). `use_base` (false) sends plain text without the chat template, for base models.
    """

    def reset(self, task: Task) -> None:
        """Read the options and the task."""
        defaults = {"use_base": False, "with_think": False, "format_score_coef": 0.1}
        args = parse_workflow_args("math_boxed_workflow", task.workflow_args, defaults)
        self.use_base, self.with_think = bool(args["use_base"]), bool(args["with_think"])
        self.format_score_coef = float(args["format_score_coef"])
        super().reset(task)
        if self.with_think and task.format_args.system_prompt is None:
            self.system_prompt = THINK_PROMPT

    def format_prompt(self) -> str:
        """Return the plain-text prompt for a base model."""
        system = f"System: {self.system_prompt}\n" if self.system_prompt else ""
        return f"{system}User: {self.task_desc}\nAssistant:"

    def run(self) -> list[Experience]:
        """Answer the prompt, with or without the chat template."""
        if not self.use_base:
            return super().run()
        return self.score(self.model.generate([self.format_prompt()], **self.rollout_args))

    def score(self, responses: Sequence[Experience]) -> list[Experience]:
        """Score the responses and add the format reward."""
        kept = super().score(responses)
        for response in kept if self.with_think else ():
            thinks = _THOUGHT.fullmatch(response.response_text or "") is not None
            response.metrics["reward/format"] = 0.0 if thinks else -self.format_score_coef
            response.reward = (response.reward or 0.0) + response.metrics["reward/format"]
        return kept
