"""Answers to the rows of a dataset, by a checkpoint in this process or by a model behind an OpenAI endpoint, scored."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from archon.data import encode_prompt
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest
from archon.remote.clients import require_package
from archon.rl.rewards import AsyncRewardWrapper, RewardFailure
from archon.schema.errors import RolloutError


@dataclass
class Answer:
    """One answer: its text, the number of its tokens where it is known, and why it ended."""

    prompt: str
    text: str
    stop_reason: str
    length: int | None = None
    ids: tuple[list[int], list[int]] | None = None  # of prompt and answer


class Answerer(Protocol):
    """Answers one row; `seed` is the answer's own."""

    async def answer(self, row: Mapping[str, Any], seed: int | None) -> Answer: ...


class CheckpointAnswerer:
    """Samples from an in-process engine, as rollouts do."""

    def __init__(self, engine: InferenceEngine, tokenizer: Any, gconfig: GenerationHyperparameters) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)

    async def answer(self, row: Mapping[str, Any], seed: int | None) -> Answer:
        prompt = encode_prompt(self._tokenizer, dict(row))
        gconfig = self._gconfig.model_copy(update={"seed": seed})
        response = await self._engine.agenerate(ModelRequest(prompt, gconfig, tokenizer=self._tokenizer))
        asked, text = self._tokenizer.batch_decode([prompt, response.output_tokens], skip_special_tokens=True)
        return Answer(asked, text, response.stop_reason, response.output_len, (prompt, response.output_tokens))


class EndpointAnswerer:
    """Asks chat completions for rows with `messages`, completions for others.

    The environment variable OPENAI_API_KEY is the endpoint's key, where it asks for one.
    """

    def __init__(self, url: str, model: str, sampling: Mapping[str, Any], max_concurrent: int) -> None:
        openai = require_package("openai")
        self._error: type[Exception] = openai.OpenAIError
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=3)
        self._url, self._model, self._sampling = url, model, dict(sampling)
        self._places = asyncio.Semaphore(max_concurrent)

    async def answer(self, row: Mapping[str, Any], seed: int | None) -> Answer:
        ask = {"model": self._model, **self._sampling} | ({} if seed is None else {"seed": seed % 2**31})
        try:
            async with self._places:
                if "messages" in row:
                    found = await self._client.chat.completions.create(messages=row["messages"], **ask)
                    prompt, text = str(row["messages"][-1]["content"]), found.choices[0].message.content or ""
                else:
                    found = await self._client.completions.create(prompt=row["prompt"], **ask)
                    prompt, text = str(row["prompt"]), found.choices[0].text
        except self._error as error:
            raise RolloutError(f"{self._url}: {error}") from None
        length = None if found.usage is None else found.usage.completion_tokens
        return Answer(prompt, text, str(found.choices[0].finish_reason), length)


@dataclass
class Scored:
    """The scored answers to row `index`, one record each, and how many were lost, by reason."""

    index: int
    records: list[dict[str, Any]] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    first_error: Exception | None = None

    @property
    def rewards(self) -> list[float]:
        """The rewards of the answers that have one."""
        return [record["reward"] for record in self.records]


async def score_answers(
    rows: Sequence[Mapping[str, Any]], answerer: Answerer, reward: AsyncRewardWrapper, n: int, seed: int | None
) -> AsyncIterator[Scored]:
    """Yield each row's `n` scored answers when all of them are there.

    An answer that the endpoint refuses or whose reward fails is lost, counted and left out: it is not scored 0.
    """

    async def one(index: int, sample: int) -> dict[str, Any]:
        row = rows[index]
        found = await answerer.answer(row, None if seed is None else derive_seed(seed, index, sample))
        score = await reward(found.prompt, found.text, *(found.ids or ()), **row)
        record = {"step": 0, "split": "eval", "group": index, "sample": sample}
        record |= {"prompt": found.prompt, "completion": found.text}
        record |= {"answer": row["answer"]} if "answer" in row else {}
        record |= {"reward": float(score), "stop_reason": found.stop_reason}
        record |= {"length": found.length} if found.length is not None else {}
        return record | ({"rewards": score.parts} if score.parts else {})

    async def score_row(index: int) -> Scored:
        scored = Scored(index)
        for outcome in await asyncio.gather(*(one(index, sample) for sample in range(n)), return_exceptions=True):
            if isinstance(outcome, RewardFailure | RolloutError):
                scored.lost[f"reward_{outcome.kind}" if isinstance(outcome, RewardFailure) else "request"] += 1
                scored.first_error = scored.first_error or outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                scored.records.append(outcome)
        return scored

    tasks = [asyncio.create_task(score_row(index)) for index in range(len(rows))]
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for task in tasks:
            task.cancel()
