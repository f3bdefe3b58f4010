"""Generates the answers to a call, whichever API it came by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, ModelRequest, ModelResponse
from archon.schema.errors import ConfigError
from archon.serve.answer_text import AnswerReader, Delta, Part, ToolCall
from archon.serve.sessions import Caller


@dataclass
class Call:
    """Prompts in tokens, each to be answered `gconfig.n_samples` times; `tools`: answers may call some."""

    id: str
    prompts: list[list[int]]
    gconfig: GenerationHyperparameters
    tools: bool = False


@dataclass
class Choice:
    """A finished answer: its text and tool calls for the client, and what was sampled."""

    index: int
    parts: list[Part]
    stop_sequence: str | None
    response: ModelResponse

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def finish(self) -> str:
        """Returns `stop`, `length` or `tool_calls`: the engine's reason, unless the answer calls tools.

        The engine sees special tokens in the text, and so may overlook a stop string that ends what the client reads.
        """
        reason = "stop" if self.stop_sequence is not None else self.response.stop_reason
        return "tool_calls" if self.calls and reason == "stop" else reason


async def answer(
    caller: Caller, call: Call, tokenizer: Any, stream: bool = False
) -> AsyncGenerator[Delta | Choice, None]:
    """Yields the deltas of every answer of a call (with `stream`), and each answer when it is finished and recorded.

    Closing the generator, or cancelling who iterates, aborts what is unfinished. Raises the first failure.
    """
    caller.admit(len(call.prompts) * call.gconfig.n_samples)
    items: asyncio.Queue[Delta | Choice | Exception] = asyncio.Queue()
    one = call.gconfig.model_copy(update={"n_samples": 1})
    tasks = []
    for index, prompt in enumerate(prompt for prompt in call.prompts for _ in range(call.gconfig.n_samples)):
        seed = caller.next_seed()
        if one.seed is not None:  # the client's own; its further answers differ from the first
            seed = derive_seed(one.seed, index) if index else one.seed
        request = ModelRequest(prompt, one.model_copy(update={"seed": seed}), tokenizer=tokenizer)
        coroutine = _answer_one(caller, call, request, index, items.put_nowait, stream)
        tasks.append(asyncio.create_task(coroutine, name=f"archon-{call.id}-{index}"))
    caller.unfinished += len(tasks)
    failed = False
    try:
        left = len(tasks)
        while left:
            item = await items.get()
            if isinstance(item, Exception):
                failed = True
                raise item
            left -= isinstance(item, Choice)
            yield item
    finally:
        for task in tasks:
            cancelled = task.cancel()
            caller.unfinished -= failed and cancelled  # a sibling failed; the client is still there
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer_one(
    caller: Caller,
    call: Call,
    request: ModelRequest,
    index: int,
    emit: Callable[[Delta | Choice | Exception], None],
    stream: bool,
) -> None:
    reader = AnswerReader(request.tokenizer, request.gconfig.stop, call.tools)

    def on_token(token: int, logprob: float) -> None:
        delta = reader.feed(token, logprob)
        if delta is not None:
            delta.index = index
            emit(delta)

    if stream:
        request.on_token = on_token
    try:
        response = await caller.engine.agenerate(request)
        caller.record(call.id, index, response)
        rest = reader.finish(response.output_tokens, response.output_logprobs)
        rest.index = index
        if stream:
            emit(rest)
        emit(Choice(index, reader.parts, reader.stop_sequence, response))
    except Exception as error:  # noqa: BLE001 (handed to whoever iterates)
        if isinstance(error, ConfigError) and caller.refusal is None:
            caller.refusal = error
        emit(error)
    caller.unfinished -= 1  # not reached when cancelled: the client has gone


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Returns each token by itself, as text, special ones too."""
    return [str(tokenizer.decode([token])) for token in tokens]
