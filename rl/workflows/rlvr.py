"""RL from verifiable rewards: one prompt, n answers, a function that scores each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from archon.data import encode_prompt
from archon.generation.record import check_answer
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse
from archon.models.vision.images import ProcessedImage
from archon.rl.episode_context import answers, workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward
from archon.rl.trajectories import trajectory_tensors
from archon.rl.workflows.base import (
    SamplingWorkflow,
    capture_outcome,
    drop_failed_samples,
    record_reward_parts,
    wrap_reward,
)


class RLVRWorkflow(SamplingWorkflow):
    """Workflow that samples and scores `gconfig.n_samples` answers per prompt.

    A row holds `messages` (for the chat template) or `prompt`, and the columns of the reward. Answers are decoded for
    the reward only and never encoded again.

    Args:
        reward_fn: a function, its name or dotted path, or an `AsyncRewardWrapper`.
        gconfig: sampling parameters.
        tokenizer: renders prompts and decodes answers; its end-of-text and padding ids stop an answer.
        enable_thinking: passed to the chat template; None: the template's default.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool | None = None,
    ) -> None:
        super().__init__(gconfig, tokenizer)
        self.template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.reward_fn = wrap_reward(reward_fn)

    def encode_row(self, data: dict[str, Any]) -> tuple[list[int], list[ProcessedImage]]:
        """Return the prompt tokens and images of a row; there are no images here."""
        return encode_prompt(self.tokenizer, data, **self.template_options), []

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return one group as trajectory tensors [n, S]; failed samples are dropped and counted by kind.

        If all samples fail, the first failure is raised.
        """
        self.reward_fn.require_columns(data)
        # 1. Sample.
        prompt_ids, images = self.encode_row(data)
        one = self.gconfig.model_copy(update={"n_samples": 1})
        requests = [
            ModelRequest(prompt_ids, one, tokenizer=self.tokenizer, image_data=images)
            for _ in range(self.gconfig.n_samples)
        ]
        responses = await answers(engine, requests)
        texts = [prompt_ids, *(response.output_tokens for response in responses)]
        prompt, *completions = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in texts)
        # 2. Score. An in-process reward needs no task: tasks would take longer than the reward.
        in_process = type(self.reward_fn) is AsyncRewardWrapper and self.reward_fn.in_process

        async def score(index: int, completion: str, response: ModelResponse) -> Reward:
            check_answer(response)
            if not in_process:
                workflow_context.enter_sample(index)
            return await self.reward_fn(prompt, completion, prompt_ids, response.output_tokens, **data)

        scores = map(score, range(len(responses)), completions, responses)
        outcomes: Sequence[Reward | BaseException]
        if in_process:
            outcomes = [await capture_outcome(one) for one in scores]
        else:
            outcomes = await asyncio.gather(*scores, return_exceptions=True)
        kept = drop_failed_samples(responses, outcomes)
        record_reward_parts(reward for _, reward in kept)
        return trajectory_tensors([response for response, _ in kept], [reward for _, reward in kept])
