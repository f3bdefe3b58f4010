"""Reinforcement learning from verifiable rewards: one prompt, n answers, a function that scores each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from torch import Tensor

from archon.data import encode_prompt
from archon.generation.record import UnusableAnswerError, check_answer
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward
from archon.rl.trajectories import trajectory_tensors
from archon.rl.workflows.base import RolloutWorkflow, kept_samples, record_parts, wrapped_reward


class RLVRWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` answers to the row's prompt and scores each; the answers form one group.

    A row carries `messages` (for the chat template) or `prompt`, and whatever the reward needs. The answers stay in
    token space: text is decoded for the reward only, and never encoded again.

    Args:
        reward_fn: a function, its name or dotted path, or an `AsyncRewardWrapper`, as which everything else is wrapped.
        gconfig: sampling values.
        tokenizer: renders prompts and decodes answers; its end-of-text and padding ids stop an answer.
    """

    returns_group = True

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
    ) -> None:
        self.reward_fn = wrapped_reward(reward_fn)
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        return super().with_gconfig(gconfig.new_with_stop_and_pad_token_ids(self.tokenizer))

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Returns one group as trajectory tensors [n, S]. Samples that fail are dropped and counted by kind.

        Raises the first failure when none of the n is left.
        """
        prompt_ids = encode_prompt(self.tokenizer, data)
        one = self.gconfig.model_copy(update={"n_samples": 1})
        responses = await asyncio.gather(
            *(
                engine.agenerate(ModelRequest(input_ids=prompt_ids, gconfig=one, tokenizer=self.tokenizer))
                for _ in range(self.gconfig.n_samples)
            )
        )
        usable = self._usable(responses)
        outcomes = await self._score(prompt_ids, usable, data)
        kept = kept_samples([response for _, response in usable], outcomes)
        record_parts(reward for _, reward in kept)
        return trajectory_tensors([response for response, _ in kept], [float(reward) for _, reward in kept])

    def _usable(self, responses: list[ModelResponse]) -> list[tuple[int, ModelResponse]]:
        usable = []
        for index, response in enumerate(responses):
            try:
                check_answer(response)
            except UnusableAnswerError as error:
                workflow_context.drop(error.kind, error)
            else:
                usable.append((index, response))
        return usable

    async def _score(
        self, prompt_ids: list[int], usable: list[tuple[int, ModelResponse]], data: dict[str, Any]
    ) -> list[Reward | BaseException]:
        prompt, *completions = self.tokenizer.batch_decode(
            [prompt_ids, *(response.output_tokens for _, response in usable)], skip_special_tokens=True
        )

        async def one(index: int, completion: str, response: ModelResponse) -> Reward:
            workflow_context.enter_sample(index)
            return await self.reward_fn(prompt, completion, prompt_ids, response.output_tokens, **data)

        return await asyncio.gather(
            *(
                one(index, completion, response)
                for (index, response), completion in zip(usable, completions, strict=True)
            ),
            return_exceptions=True,
        )
