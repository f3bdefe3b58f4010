"""Generates the answers to a call of any protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, ModelRequest, ModelResponse
from archon.schema.errors import ConfigError
from archon.serve.answer_text import AnswerParser, Delta, Part, ToolCall
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
    """A finished answer: its text and tool calls, and the engine's response."""

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
    def finish_reason(self) -> str:
        """Returns `stop`, `length` or `tool_calls`: the engine's reason, unless the answer calls tools.

        The engine matches stop strings in text with special tokens, and so may miss one in the client's text.
        """
        reason = "stop" if self.stop_sequence is not None else self.response.stop_reason
        return "tool_calls" if self.calls and reason == "stop" else reason


async def generate(
    caller: Caller, call: Call, tokenizer: Any, stream: bool = False
) -> AsyncGenerator[Delta | Choice, None]:
    """Yields the deltas of every answer of a call (with `stream`), and each answer once it is finished and recorded.

    Closing the generator, or canceling the task that iterates, aborts unfinished answers. Raises the first failure.
    """
    caller.admit(len(call.prompts) * call.gconfig.n_samples)
    items: asyncio.Queue[Delta | Choice | Exception] = asyncio.Queue()
    one = call.gconfig.model_copy(update={"n_samples": 1})

    async def sample(index: int, request: ModelRequest) -> None:
        try:
            parser = AnswerParser(tokenizer, one.stop, call.tools, index)

            def on_token(token: int, logprob: float) -> None:
                delta = parser.feed(token, logprob)
                if delta is not None:
                    items.put_nowait(delta)

            if stream:
                request.on_token = on_token
            response = await caller.engine.agenerate(request)
            caller.record(call.id, index, response)
            rest = parser.finish(response.output_tokens, response.output_logprobs)
            if stream:
                items.put_nowait(rest)
            items.put_nowait(Choice(index, parser.parts, parser.stop_sequence, response))
        except Exception as error:  # noqa: BLE001 (raised in the consumer)
            if isinstance(error, ConfigError) and caller.refusal is None:
                caller.refusal = error
            items.put_nowait(error)
        caller.unfinished -= 1  # not reached when canceled: the client has gone

    tasks = []
    for index, prompt in enumerate(prompt for prompt in call.prompts for _ in range(call.gconfig.n_samples)):
        seed = caller.next_seed()
        if one.seed is not None:  # the client's own; its further answers differ from the first
            seed = derive_seed(one.seed, index) if index else one.seed
        request = ModelRequest(prompt, one.model_copy(update={"seed": seed}), tokenizer=tokenizer)
        tasks.append(asyncio.create_task(sample(index, request), name=f"archon-{call.id}-{index}"))
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
            canceled = task.cancel()
            caller.unfinished -= failed and canceled  # another answer failed; the client is still there
        await asyncio.gather(*tasks, return_exceptions=True)
