"""Workflows in the shapes of AReaL's public guides; a user's module, of which only the imports are archon's."""

from __future__ import annotations

import uuid
from typing import Any

import torch

from archon.rl import (
    AsyncRewardWrapper,
    GenerationHyperparameters,
    InferenceEngine,
    InteractionWithTokenLogpReward,
    ModelRequest,
    RolloutWorkflow,
    concat_padded_tensors,
)


def digits(result: str, answer: str) -> float:
    """A reward with names of its own for its arguments."""
    return float(sum(character in answer for character in result))


class OneAnswer(RolloutWorkflow):
    """A run asks once, wraps the reward it is given, and returns the short form."""

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any, reward_fn: Any) -> None:
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self.scored_by = AsyncRewardWrapper(reward_fn)
        self.versions: list[int] = []

    async def ask(self, engine: InferenceEngine, messages: list[dict[str, Any]]) -> Any:
        ids = self.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
        gconfig = self.gconfig.new(n_samples=1)
        request = ModelRequest(rid=uuid.uuid4().hex, input_ids=list(ids), gconfig=gconfig, tokenizer=self.tokenizer)
        return await engine.agenerate(request)

    def texts(self, response: Any) -> tuple[str, str]:
        return self.tokenizer.decode(response.input_tokens), self.tokenizer.decode(response.output_tokens)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        self.versions.append(engine.get_version())
        response = await self.ask(engine, data["messages"])
        prompt, completion = self.texts(response)
        reward = await self.scored_by(prompt, completion, response.input_tokens, response.output_tokens, **data)
        return self.result(response, reward)

    def result(self, response: Any, reward: float) -> Any:
        return {
            "input_ids": torch.tensor(response.input_tokens),
            "output_ids": torch.tensor(response.output_tokens),
            "reward": torch.tensor(reward),
        }


class TwoTexts(OneAnswer):
    """Calls the reward with prompt and completion alone."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        response = await self.ask(engine, data["messages"])
        return self.result(response, await self.scored_by(*self.texts(response), **data))


class OwnNames(OneAnswer):
    """Calls a reward by the names that are its own."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        response = await self.ask(engine, data["messages"])
        reward = await self.scored_by(result=self.texts(response)[1], answer=data["answer"])
        return {"1": InteractionWithTokenLogpReward(model_response=response, reward=reward)}


class Retries(OneAnswer):
    """Adds to the row's own messages, calls the reward by keyword, and builds one row of tensors by itself."""

    turns = 2

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        row: dict[str, list[Any]] = {"input_ids": [], "logprobs": [], "loss_mask": [], "versions": []}
        messages, completion, earned = data["messages"], "", 0.0
        for turn in range(self.turns):
            if turn:
                messages += [{"role": "assistant", "content": completion}, {"role": "user", "content": "1+"}]
            response = await self.ask(engine, messages)
            prompt, completion = self.texts(response)
            earned += await self.scored_by(
                prompt=prompt,
                completions=completion,
                prompt_ids=response.input_tokens,
                completion_ids=response.output_tokens,
                **data,
            )
            given = response.input_tokens[len(row["input_ids"]) :]
            row["input_ids"] += given + response.output_tokens
            row["logprobs"] += [0.0] * len(given) + response.output_logprobs
            row["loss_mask"] += [0] * len(given) + [1] * response.output_len
            row["versions"] += [-1] * len(given) + response.output_versions
        columns = {name: torch.tensor(values).unsqueeze(0) for name, values in row.items()}
        columns["attention_mask"] = torch.ones_like(columns["input_ids"], dtype=torch.bool)
        columns["rewards"] = torch.tensor([float(earned)])
        return concat_padded_tensors([columns])
