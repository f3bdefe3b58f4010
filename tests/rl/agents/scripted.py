"""What the agents' tests share: a chat template with tools, and a generator that answers what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from archon.rl.agents import AgentServer
from archon.rl.types import ModelRequest, ModelResponse

# As Qwen's templates write tools and calls.
HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- ('' if loop.first and not message.content else '\n') + '<tool_call>\n{\"name\": \"' + call.function.name }}"
    "{{- '\", \"arguments\": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
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
