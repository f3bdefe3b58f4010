"""OpenAI's chat completions and completions."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from archon.data.encoding import encode_prompt
from archon.schema.errors import RolloutError
from archon.serve.answering import Call, Choice, token_texts
from archon.serve.body import (
    MAX_CHOICES,
    Api,
    Content,
    Event,
    FunctionSpec,
    Integer,
    OpenAISampling,
    Positive,
    RequestModel,
    TokenId,
    called,
    prompt_tokens,
    text_of,
)
from archon.serve.reading import Part, Piece, ToolCall
from archon.serve.sessions import Asker

DONE: Event = (None, "[DONE]")


class CalledFunction(RequestModel):
    name: str
    arguments: str


class SentToolCall(RequestModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Integer | None = None


# The validator of the same name, for who reads the description.
_SAYS_SOMETHING: dict[str, Any] = {
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},
        {
            "properties": {
                "content": {"not": {"type": "null"}},
                "tool_calls": {"anyOf": [{"type": "null"}, {"maxItems": 0}]},
            },
            "required": ["content"],
        },
    ]
}


class ChatMessage(RequestModel):
    """A message of the conversation. Of an answer sent back, the fields that are empty here are taken too."""

    model_config = ConfigDict(json_schema_extra=_SAYS_SOMETHING)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    refusal: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs a content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not a message's of role {self.role}")
        return self

    def for_template(self, where: str) -> dict[str, Any]:
        """As chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [
                called(call.id, call.function.name, call.function.arguments, where) for call in self.tool_calls
            ]
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in named.items() if value is not None}


class ChatTool(RequestModel):
    type: Literal["function"]
    function: FunctionSpec


class TextFormat(RequestModel):
    type: Literal["text"]


class ChatBody(OpenAISampling):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=0, description="only sampled tokens have a logprob")
    tools: list[ChatTool] | None = None
    tool_choice: Literal["auto", "none"] | None = Field(None, description="what the model calls cannot be forced")
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    store: bool | None = Field(None, description="without effect")
    service_tier: str | None = Field(None, description="without effect")

    def changes(self) -> dict[str, Any]:
        changes = super().changes()
        if self.max_completion_tokens is not None:
            changes["max_new_tokens"] = self.max_completion_tokens
        return changes


def usage(choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Tokens read and sampled; each prompt counts once."""
    read, sampled = sum(map(len, prompts)), sum(choice.response.output_len for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


class _Completions(Api):
    """What both completion APIs have in common: chunks that all look alike, and `[DONE]`."""

    chunk_object: str
    body: OpenAISampling
    _logprobs: bool

    def _envelope(self, name: str, model: str) -> None:
        self._head = {"id": self.call.id, "object": name, "created": int(time.time()), "model": model}
        self.stream = bool(self.body.stream)

    def _chunk(self, *choices: dict[str, Any], **further: Any) -> Event:
        return None, {**self._head, "object": self.chunk_object, "choices": list(choices), **further}

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        written = [self._choice(choice) for choice in choices]
        return {**self._head, "choices": written, "usage": usage(choices, self.call.prompts)}

    def finish(self, choices: list[Choice]) -> Iterable[Event]:
        if self.body.wants_usage:
            yield self._chunk(usage=usage(choices, self.call.prompts))
        yield DONE

    def failed(self, error: dict[str, Any]) -> Iterable[Event]:
        return [(None, error)]

    @property
    def _shows_tokens(self) -> bool:
        """Whether the client sees the tokens themselves, or their logprobs."""
        return self.body.return_token_ids or self._logprobs

    @abstractmethod
    def _choice(self, choice: Choice) -> dict[str, Any]:
        """An answer in the response to a request without `stream`."""


class ChatApi(_Completions):
    """`POST /v1/chat/completions`. With `return_token_ids`, `prompt_token_ids` and each choice's `token_ids` come too,
    as from vLLM."""

    body_class = ChatBody
    chunk_object = "chat.completion.chunk"

    def __init__(self, data: dict[str, Any], asker: Asker, tokenizer: Any, model: str) -> None:
        self.body = body = ChatBody.parse(data, source="request")
        self._logprobs, self._tokenizer = bool(body.logprobs), tokenizer
        tools = [] if body.tool_choice == "none" else [tool.function.for_template() for tool in body.tools or []]
        messages = [message.for_template(f"messages.{i}") for i, message in enumerate(body.messages)]
        prompt = prompt_tokens(tokenizer, messages, tools)
        self.call = Call(f"chatcmpl-{uuid.uuid4().hex}", [prompt], body.gconfig(asker.gconfig), bool(tools))
        self._n_calls = dict.fromkeys(range(self.call.gconfig.n_samples), 0)
        self._envelope("chat.completion", model)

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        further = {"prompt_token_ids": self.call.prompts[0]} if self.body.return_token_ids else {}
        return super().whole(choices) | further

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            calls = [_tool_call(call) for call in choice.calls]
            message |= {"content": choice.text or None, "tool_calls": calls}
        response = choice.response
        written = self._tokens(response.output_tokens, response.output_logprobs)
        return {"index": choice.index, "message": message, "finish_reason": choice.finish} | written

    def _tokens(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        written: dict[str, Any] = {"logprobs": None}
        if self._logprobs:
            texts = token_texts(self._tokenizer, tokens)
            written["logprobs"] = {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, logprob in zip(texts, logprobs, strict=True)
                ],
                "refusal": None,
            }
        if self.body.return_token_ids:
            written["token_ids"] = list(tokens)
        return written

    def begin(self) -> Iterable[Event]:
        first = {"prompt_token_ids": self.call.prompts[0]} if self.body.return_token_ids else {}
        for index in self._n_calls:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "finish_reason": None}, **first)

    def piece(self, piece: Piece) -> Iterable[Event]:
        written = self._tokens(piece.tokens, piece.logprobs)
        deltas = self._deltas(piece.parts, piece.index)
        if not deltas and piece.tokens and self._shows_tokens:
            deltas = [{}]
        for delta in deltas:
            yield self._chunk({"index": piece.index, "delta": delta, "finish_reason": None} | written)
            written = self._tokens([], [])  # with the first delta only

    def _deltas(self, parts: Sequence[Part], index: int) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, ToolCall):
                deltas.append({"tool_calls": [{"index": self._n_calls[index], **_tool_call(part)}]})
                self._n_calls[index] += 1
            else:
                deltas.append({"content": part})
        return deltas

    def ended(self, choice: Choice) -> Iterable[Event]:
        yield self._chunk({"index": choice.index, "delta": {}, "finish_reason": choice.finish})


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionBody(OpenAISampling):
    """`POST /v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] = Field(
        description="text, tokens, or a list of these"
    )
    logprobs: Integer | None = Field(
        None, ge=0, le=0, description="0: those of the sampled tokens; there are no others"
    )
    echo: Literal[False] | None = None
    suffix: None = None

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """In tokens; text as the tokenizer begins a text."""
        given: Any = self.prompt
        if isinstance(given, str) or not any(isinstance(item, str | list) for item in given):
            given = [given]
        return [encode_prompt(tokenizer, {"prompt": item}) if isinstance(item, str) else item for item in given]


class CompletionApi(_Completions):
    """`POST /v1/completions`; choice i answers prompt i // n. `return_token_ids` as vLLM has it."""

    body_class = CompletionBody
    chunk_object = "text_completion"

    def __init__(self, data: dict[str, Any], asker: Asker, tokenizer: Any, model: str) -> None:
        self.body = body = CompletionBody.parse(data, source="request")
        self._logprobs, self._tokenizer = body.logprobs is not None, tokenizer
        prompts, gconfig = body.prompts(tokenizer), body.gconfig(asker.gconfig)
        if len(prompts) * gconfig.n_samples > MAX_CHOICES:
            raise RolloutError(
                f"{len(prompts)} prompts with n = {gconfig.n_samples} are {len(prompts) * gconfig.n_samples} answers; "
                f"one request may ask for {MAX_CHOICES}"
            )
        self.call = Call(f"cmpl-{uuid.uuid4().hex}", prompts, gconfig)
        self._offsets: dict[int, int] = {}
        self._envelope("text_completion", model)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        response = choice.response
        written = self._tokens(choice.index, response.output_tokens, response.output_logprobs)
        if self.body.return_token_ids:
            written["prompt_token_ids"] = response.input_tokens
        return {"index": choice.index, "text": choice.text, "finish_reason": choice.finish} | written

    def _tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        written: dict[str, Any] = {"logprobs": None}
        if self._logprobs:
            texts = token_texts(self._tokenizer, tokens)
            offsets = list(self._offsets_of(index, texts))
            written["logprobs"] = {
                "tokens": texts,
                "token_logprobs": list(logprobs),
                "top_logprobs": None,
                "text_offset": offsets,
            }
        if self.body.return_token_ids:
            written["token_ids"] = list(tokens)
        return written

    def _offsets_of(self, index: int, texts: Sequence[str]) -> Iterator[int]:
        """Where each token's text begins, in characters, special tokens counted."""
        for text in texts:
            yield self._offsets.setdefault(index, 0)
            self._offsets[index] += len(text)

    def begin(self) -> Iterable[Event]:
        return ()

    def piece(self, piece: Piece) -> Iterable[Event]:
        if piece.parts or (piece.tokens and self._shows_tokens):
            text = "".join(part for part in piece.parts if isinstance(part, str))
            written = self._tokens(piece.index, piece.tokens, piece.logprobs)
            yield self._chunk({"index": piece.index, "text": text, "finish_reason": None} | written)

    def ended(self, choice: Choice) -> Iterable[Event]:
        yield self._chunk({"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish})
