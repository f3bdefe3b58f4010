"""What the agents' tests share: a tool, and a generator that answers what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from archon.generation.types import ModelRequest, ModelResponse
from archon.serve import AgentServer

WEATHER = {
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
ASKS_WEATHER = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 2}}\n</tool_call>'

Start = Callable[..., Awaitable[tuple[AgentServer, str]]]


class Scripted:
    """Answers what it is told to; for texts that no tiny model writes. Keeps the requests."""

    version = 3

    def __init__(self, tokenizer: Any, answers: Sequence[str | list[int]], tells_tokens: bool = True) -> None:
        self._tokenizer, self._answers, self._tells_tokens = tokenizer, iter(answers), tells_tokens
        self.requests: list[ModelRequest] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        answer = next(self._answers)
        tokens = self._tokenizer(answer).input_ids if isinstance(answer, str) else answer
        tokens = [*tokens, self._tokenizer.eos_token_id]
        logprobs = [-0.5 - 0.01 * i for i in range(len(tokens))]
        for token, logprob in zip(tokens, logprobs, strict=True):
            await asyncio.sleep(0)
            if req.on_token is not None and self._tells_tokens:
                req.on_token(token, logprob)
        return ModelResponse(list(req.input_ids), tokens, logprobs, [self.version] * len(tokens))
