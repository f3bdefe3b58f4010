"""Scored answers to dataset rows, by an in-process checkpoint or an OpenAI endpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from archon.data import encode_prompt
from archon.data.encoding import tokenize
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest
from archon.rl.endpoint import Endpoint
from archon.rl.rewards import AsyncRewardWrapper, RewardFailure
from archon.schema.errors import RolloutError
from archon.schema.tasks import results_as_completed


@dataclass
class Answer:
    """Answer text with stop reason and, if known, length in tokens and token ids (prompt, answer)."""

    prompt: str
    text: str
    stop_reason: str
    length: int | None = None
    ids: tuple[list[int], list[int]] | None = None


class Answerer(Protocol):
    """Source of answers."""

    async def answer(self, row: Mapping[str, Any], seed: int | None) -> Answer:
        """Answer one row with a seed."""
        ...


class CheckpointAnswerer:
    """Answers sampled from an in-process engine."""

    def __init__(self, engine: InferenceEngine, tokenizer: Any, gconfig: GenerationHyperparameters) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)

    async def answer(self, row: Mapping[str, Any], seed: int | None) -> Answer:
        """Sample one answer."""
        prompt = encode_prompt(self._tokenizer, row)
        gconfig = self._gconfig.model_copy(update={"seed": seed})
        rid = f"for {getattr(row, 'where', 'a row')}"
        response = await self._engine.agenerate(ModelRequest(prompt, gconfig, rid=rid, tokenizer=self._tokenizer))
        question, text = self._tokenizer.batch_decode([prompt, response.output_tokens], skip_special_tokens=True)
        return Answer(question, text, response.stop_reason, response.output_len, (prompt, response.output_tokens))


class EndpointAnswerer:
    """Answers from an endpoint: chat completions for rows with `messages`, else completions.

    The environment variable OPENAI_API_KEY holds the endpoint's key. With the model's `tokenizer`, prompts and token
    ids are as for a checkpoint. Without it, a prompt is the last message, and there are no token ids.
    """

    def __init__(
        self, url: str, model: str, sampling: Mapping[str, Any], max_concurrent: int, tokenizer: Any = None
    ) -> None:
        self._endpoint = Endpoint(url, url)
        self._model, self._sampling = model, dict(sampling)
        self._slots = asyncio.Semaphore(max_concurrent)
        self._tokenizer = tokenizer

    async def answer(self, row: Mapping[str, Any], seed: int | None) -> Answer:
        """Request one answer."""
        options = {"model": self._model, **self._sampling} | ({} if seed is None else {"seed": seed % 2**31})
        prompt_ids = None if self._tokenizer is None else encode_prompt(self._tokenizer, row)
        n_tokens = self._sampling["max_tokens"]
        async with self._slots:
            if "messages" in row:
                completion = await self._endpoint.complete(n_tokens, messages=row["messages"], **options)
                prompt, found = str(row["messages"][-1]["content"]), completion.find("choices", 0, "message", "content")
                text = "" if found is None else found.content()  # null for a call of a tool
            else:
                completion = await self._endpoint.complete(n_tokens, prompt=row["prompt"], **options)
                prompt, text = str(row["prompt"]), completion.at("choices", 0, "text").content()
        usage = completion.find("usage", "completion_tokens")
        length = None if usage is None else usage.integer()
        reason, ids = completion.at("choices", 0, "finish_reason").text(), None
        if prompt_ids is not None:
            answer_ids = list(tokenize(self._tokenizer, text, "an answer")["input_ids"])
            ids = prompt_ids, answer_ids + ([self._tokenizer.eos_token_id] if reason == "stop" else [])
            prompt = self._tokenizer.decode(prompt_ids, skip_special_tokens=True)
        return Answer(prompt, text, reason, length, ids)


@dataclass
class Scored:
    """Scored answers to row `index`, one record each, and lost answers by reason."""

    index: int
    records: list[dict[str, Any]] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    first_error: Exception | None = None

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored answers."""
        return [record["reward"] for record in self.records]


async def score_answers(
    rows: Sequence[Mapping[str, Any]], answerer: Answerer, reward: AsyncRewardWrapper, n: int, seed: int | None
) -> AsyncIterator[Scored]:
    """Yield each row's `n` scored answers once all are scored.

    A failed request or reward is counted as lost and never scored 0.
    """

    async def one(index: int, sample: int) -> dict[str, Any]:
        row = rows[index]
        answer = await answerer.answer(row, None if seed is None else derive_seed(seed, index, sample))
        score = await reward(answer.prompt, answer.text, *(answer.ids or ()), **row)
        record = {"step": 0, "split": "eval", "group": index, "sample": sample}
        record |= {"prompt": answer.prompt, "completion": answer.text}
        record |= {"answer": row["answer"]} if "answer" in row else {}
        record |= {"reward": float(score), "stop_reason": answer.stop_reason}
        record |= {"length": answer.length} if answer.length is not None else {}
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
    async for scored in results_as_completed(tasks):
        yield scored
