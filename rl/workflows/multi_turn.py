"""Multi-turn workflow: after a wrong answer the model tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from torch import Tensor

from archon.data import encode_prompt
from archon.generation.record import TokenRecord
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelResponse
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward
from archon.rl.trajectories import trajectory_tensors
from archon.rl.workflows.base import SamplingWorkflow, drop_failed_samples, record_reward_parts, wrap_reward
from archon.rl.workflows.conversation import converse
from archon.schema.errors import ConfigError

RETRY = "That is not right. Try again."


class MultiTurnWorkflow(SamplingWorkflow):
    """Workflow that samples `gconfig.n_samples` conversations of up to `max_turns` answers.

    An answer with a reward below `reward_threshold` is followed by the message `retry`. The reward of a conversation is
    the reward of its last answer times `turn_discount` for each earlier turn. All answers are trained.

    Args:
        reward_fn: as for `RLVRWorkflow`.
        gconfig: sampling parameters of each turn; `max_tokens` limits the conversation.
        tokenizer: renders prompts and messages; its end-of-text and padding ids stop an answer.
        max_turns: maximum number of answers.
        turn_discount: reward factor for each turn after the first, in (0, 1].
        reward_threshold: reward that ends the conversation.
        retry: the user's message after a lower reward.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 2,
        turn_discount: float = 1.0,
        reward_threshold: float = 1.0,
        retry: str = RETRY,
    ) -> None:
        if max_turns < 1 or not 0 < turn_discount <= 1:
            raise ConfigError(
                f"max_turns = {max_turns} must be at least 1, and turn_discount = {turn_discount:g} in (0, 1]"
            )
        super().__init__(gconfig, tokenizer)
        self.reward_fn = wrap_reward(reward_fn)
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.reward_threshold = reward_threshold
        self.retry = retry

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return one group of conversations as trajectory tensors [n, S]; `turn_ids` is the turn of each token.

        Failed conversations are dropped and counted by kind. If all fail, the first failure is raised.
        """
        self.reward_fn.require_columns(data)
        prompt_ids = encode_prompt(self.tokenizer, data)
        records = [TokenRecord() for _ in range(self.gconfig.n_samples)]
        outcomes = await asyncio.gather(
            *(self._converse(engine, record, prompt_ids, data, index) for index, record in enumerate(records)),
            return_exceptions=True,
        )
        kept = drop_failed_samples(records, outcomes)
        record_reward_parts(reward for _, reward in kept)
        for record, _ in kept:
            workflow_context.record(turns=record.turns)
        discounted = [reward.scaled(self.turn_discount ** (record.turns - 1)) for record, reward in kept]
        return trajectory_tensors([record for record, _ in kept], discounted)

    async def _converse(
        self, engine: InferenceEngine, record: TokenRecord, prompt_ids: list[int], data: dict[str, Any], index: int
    ) -> Reward:
        """Fill `record` and return the reward of its last answer."""
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=True)
        reward = Reward(0.0)

        async def reply(completion: str, response: ModelResponse) -> str | None:
            nonlocal reward
            reward = await self.reward_fn(prompt, completion, prompt_ids, response.output_tokens, **data)
            return None if reward >= self.reward_threshold or record.turns == self.max_turns else self.retry

        await converse(engine, record, prompt_ids, index, reply, self.gconfig, self.tokenizer)
        return reward
