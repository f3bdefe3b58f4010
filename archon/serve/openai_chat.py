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
from archon.serve.answer_text import Delta, Part, ToolCall
from archon.serve.answering import Call, Choice, token_texts
from archon.serve.api import (
    MAX_CHOICES,
    Api,
    Content,
    Count,
    Event,
    FinishReason,
    FunctionSpec,
    Integer,
    OpenAISampling,
    Positive,
    RequestModel,
    ResponseModel,
    TokenId,
    optional,
    prompt_tokens,
    text_of,
    tool_call_message,
)
from archon.serve.sessions import Caller

DONE: Event = (None, "[DONE]")


class CalledFunction(RequestModel):
    name: str
    arguments: str


class SentToolCall(RequestModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Integer | None = None


# The validator of the same name, as JSON Schema.
_HAS_CONTENT: dict[str, Any] = {
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
    """A message of the conversation. The fields that must be empty are those of an answer that is sent back."""

    model_config = ConfigDict(json_schema_extra=_HAS_CONTENT)

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
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs a content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not a message's of role {self.role}")
        return self

    def for_template(self, where: str) -> dict[str, Any]:
        """Returns it as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [
                tool_call_message(call.id, call.function.name, call.function.arguments, where)
                for call in self.tool_calls
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


class Usage(ResponseModel):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[Count]
    top_logprobs: list[Any] = Field([], max_length=0)


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerToolCall(ResponseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = optional(min_length=1)


class ChatChoice(ResponseModel):
    index: Count
    finish_reason: FinishReason
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    token_ids: list[Count] | None = optional()


class ChatCompletion(ResponseModel):
    """With `return_token_ids`, `prompt_token_ids` and each choice's `token_ids` come too, as from vLLM."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage
    prompt_token_ids: list[Count] | None = optional()


def usage(choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Returns tokens read and sampled; each prompt counts once."""
    read, sampled = sum(map(len, prompts)), sum(choice.response.output_len for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


class _Completions(Api):
    """What both completion APIs have in common: chunks of one form, and `[DONE]`."""

    chunk_object: str
    response_class: type[ResponseModel]
    body: OpenAISampling
    _logprobs: bool

    def _envelope(self, name: str, model: str) -> None:
        self._head = {"id": self.call.id, "object": name, "created": int(time.time()), "model": model}
        self.stream = bool(self.body.stream)

    def _chunk(self, *choices: dict[str, Any], **further: Any) -> Event:
        return None, {**self._head, "object": self.chunk_object, "choices": list(choices), **further}

    def response(self, choices: list[Choice]) -> ResponseModel:
        written = [self._choice(choice) for choice in choices]
        given = {**self._head, "choices": written, "usage": usage(choices, self.call.prompts), **self._prompt()}
        return self.response_class.model_validate(given)

    def _prompt(self) -> dict[str, Any]:
        """Returns what a response or the first chunks say of the prompt."""
        return {}

    def on_end(self, choices: list[Choice]) -> Iterable[Event]:
        if self.body.wants_usage:
            yield self._chunk(usage=usage(choices, self.call.prompts))
        yield DONE

    def on_error(self, error: dict[str, Any]) -> Iterable[Event]:
        return [(None, error)]

    @property
    def _shows_tokens(self) -> bool:
        """Returns whether the client sees the tokens themselves, or their logprobs."""
        return self.body.return_token_ids or self._logprobs

    @abstractmethod
    def _choice(self, choice: Choice) -> dict[str, Any]:
        """Returns an answer as the response to a request without `stream` has it."""


class ChatApi(_Completions):
    """`POST /v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    response_class = ChatCompletion

    def __init__(self, body: Any, caller: Caller, tokenizer: Any, model: str) -> None:
        self.body: ChatBody = body
        self._logprobs, self._tokenizer = bool(body.logprobs), tokenizer
        tools = [] if body.tool_choice == "none" else [tool.function.for_template() for tool in body.tools or []]
        messages = [message.for_template(f"messages.{i}") for i, message in enumerate(body.messages)]
        prompt = prompt_tokens(tokenizer, messages, tools)
        self.call = Call(f"chatcmpl-{uuid.uuid4().hex}", [prompt], body.gconfig(caller.gconfig), bool(tools))
        self._n_calls = dict.fromkeys(range(self.call.gconfig.n_samples), 0)
        self._envelope("chat.completion", model)

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.call.prompts[0]} if self.body.return_token_ids else {}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"content": choice.text}
        if choice.calls:
            calls = [_tool_call(call) for call in choice.calls]
            message = {"content": choice.text or None, "tool_calls": calls}
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

    def on_start(self) -> Iterable[Event]:
        for index in self._n_calls:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "finish_reason": None}, **self._prompt())

    def on_delta(self, delta: Delta) -> Iterable[Event]:
        written = self._tokens(delta.tokens, delta.logprobs)
        messages = self._messages(delta.parts, delta.index)
        if not messages and delta.tokens and self._shows_tokens:
            messages = [{}]
        for message in messages:
            yield self._chunk({"index": delta.index, "delta": message, "finish_reason": None} | written)
            written = self._tokens([], [])  # with the first of them only

    def _messages(self, parts: Sequence[Part], index: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, ToolCall):
                messages.append({"tool_calls": [{"index": self._n_calls[index], **_tool_call(part)}]})
                self._n_calls[index] += 1
            else:
                messages.append({"content": part})
        return messages

    def on_choice(self, choice: Choice) -> Iterable[Event]:
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
        """Returns them in tokens; text as the tokenizer begins a text."""
        given: Any = self.prompt
        if isinstance(given, str) or not any(isinstance(item, str | list) for item in given):
            given = [given]
        return [encode_prompt(tokenizer, {"prompt": item}) if isinstance(item, str) else item for item in given]


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[Count]


class CompletionChoice(ResponseModel):
    index: Count
    finish_reason: FinishReason
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[Count] | None = optional()
    prompt_token_ids: list[Count] | None = optional()


class Completion(ResponseModel):
    """`return_token_ids` as vLLM has it."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: Usage


class CompletionApi(_Completions):
    """`POST /v1/completions`; choice i answers prompt i // n."""

    chunk_object = "text_completion"
    response_class = Completion

    def __init__(self, body: Any, caller: Caller, tokenizer: Any, model: str) -> None:
        self.body: CompletionBody = body
        self._logprobs, self._tokenizer = body.logprobs is not None, tokenizer
        prompts, gconfig = body.prompts(tokenizer), body.gconfig(caller.gconfig)
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
        """Yields where each token's text begins, in characters, special tokens counted."""
        for text in texts:
            yield self._offsets.setdefault(index, 0)
            self._offsets[index] += len(text)

    def on_start(self) -> Iterable[Event]:
        return ()

    def on_delta(self, delta: Delta) -> Iterable[Event]:
        if delta.parts or (delta.tokens and self._shows_tokens):
            text = "".join(part for part in delta.parts if isinstance(part, str))
            written = self._tokens(delta.index, delta.tokens, delta.logprobs)
            yield self._chunk({"index": delta.index, "text": text, "finish_reason": None} | written)

    def on_choice(self, choice: Choice) -> Iterable[Event]:
        yield self._chunk({"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish})
