"""What the APIs share: sampling fields, contents made of parts, tools, the prompt's tokens, forms of answers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi.sse import format_sse_event
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from archon.data.encoding import has_chat_template, render, tokenize
from archon.generation.types import GenerationHyperparameters
from archon.schema.config import StrictModel
from archon.schema.errors import RolloutError
from archon.serve.answer_text import Delta, load_json
from archon.serve.answering import Call, Choice
from archon.serve.sessions import Caller

Event = tuple[str | None, dict[str, Any] | str]
"""A server-sent event: its name, if it has one, and its data."""

MAX_CHOICES = 128


def _integral(value: Any) -> Any:
    """Returns 1 for 1.0: the two are one number in JSON, and some clients write the latter."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Zero = Annotated[float, Field(ge=0, le=0)]
Integer = Annotated[int, BeforeValidator(_integral)]
Positive = Annotated[Integer, Field(ge=1)]
# What these refuse further, the engine does, in better words.
TokenId = Annotated[Integer, WithJsonSchema({"type": "integer", "minimum": 0})]
StopString = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]


Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls"]


def optional(**constraints: Any) -> Any:
    """A field of a response that is left out where it is not set."""
    return Field(None, exclude_if=lambda value: value is None, **constraints)


class ResponseModel(BaseModel):
    """A JSON object that the server sends."""

    model_config = ConfigDict(extra="forbid")


class RequestModel(StrictModel):
    """A JSON object that a client sends, taken as it stands: "5" is no number, and 5 no text."""

    model_config = ConfigDict(strict=True)


class Body(RequestModel):
    """Fields of every API. A field that could change the answer and is not honoured is refused, not ignored."""

    model: str = Field("", description="any name; the server has one model")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0 is the most likely token")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=1, lt=2**63)
    metadata: dict[str, Any] | None = Field(None, description="without effect")

    def changes(self) -> dict[str, Any]:
        """Returns the sampling values that this body sets, by the names of `GenerationHyperparameters`."""
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.temperature is not None:
            greedy = self.temperature == 0
            given |= {"greedy": greedy, "temperature": None if greedy else self.temperature}
        return given

    def gconfig(self, base: GenerationHyperparameters) -> GenerationHyperparameters:
        """Returns `base` with what this body sets; `ConfigError` names a value that is out of range."""
        given = {name: value for name, value in self.changes().items() if value is not None}
        if "stop_token_ids" in given:  # beside those that end a turn
            given["stop_token_ids"] = [*base.stop_token_ids, *given["stop_token_ids"]]
        return GenerationHyperparameters.parse({**base.model_dump(), "n_samples": 1, **given}, source="request")


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class OpenAISampling(Body):
    """Sampling fields of chat completions and completions, with vLLM's additions."""

    n: Integer | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: Positive | None = None
    stop: StopString | list[StopString] | None = None
    seed: Integer | None = Field(None, ge=0, lt=2**63)
    min_tokens: Integer | None = Field(None, ge=0)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="return the tokens of prompt and answer as well")
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    user: str | None = Field(None, description="without effect")

    def changes(self) -> dict[str, Any]:
        return super().changes() | {
            "n_samples": self.n,
            "max_new_tokens": self.max_tokens,
            "stop": self.stop,
            "seed": self.seed,
            "min_new_tokens": self.min_tokens,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
        }

    @property
    def wants_usage(self) -> bool:
        """Returns whether a stream ends with the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(RequestModel):
    """A part of a content. Fields of an answer that is sent back have no effect."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    citations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


Content = str | list[TextPart]


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """Returns a content as one string; None is an empty one."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class FunctionSpec(RequestModel):
    """A tool, as its caller describes it."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="without effect: arguments are what the model writes")

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates expect it."""
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"strict"})}


def tool_call_message(call_id: str, name: str, arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    """Returns a tool call of an earlier turn for a chat template; `RolloutError` unless `arguments` is an object."""
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments or "{}")
        except ValueError as error:
            raise RolloutError(f"{where}: the arguments of {name!r:.80} are not JSON ({error})") from None
        if not isinstance(arguments, dict):
            raise RolloutError(f"{where}: the arguments of {name!r:.80} are not a JSON object")
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def prompt_tokens(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
    """Returns a conversation rendered by the chat template with the generation prompt, in tokens.

    Raises `RolloutError` where there is no template, or one that leaves tools out; `DatasetError` for a conversation
    that the template refuses.
    """
    if not has_chat_template(tokenizer):
        raise RolloutError("the model's tokenizer has no chat template; send the whole prompt to /v1/completions")
    text = render(tokenizer, messages, "messages", add_generation_prompt=True)
    if tools:
        without, text = text, render(tokenizer, messages, "messages", add_generation_prompt=True, tools=list(tools))
        if text == without:
            raise RolloutError("tools were given, and the model's chat template has no place for them")
    return list(tokenize(tokenizer, text, "messages")["input_ids"])


class Api(ABC):
    """One call of one API: reads its body and writes its answers, as a whole or as a stream of server-sent events.

    `response` returns the whole; `choices` in order. A stream is what `on_start`, `on_delta` (more of an answer),
    `on_choice` (an answer is finished) and `on_end` (all are) return, or, where it breaks off, `on_error`.

    Args:
        body: the request's body.
        caller: its sampling values hold where the body sets none.
        tokenizer: renders prompts.
        model: the name to answer with.

    Raises a `UserError` for a body that cannot be honoured.
    """

    call: Call
    stream: bool

    @abstractmethod
    def __init__(self, body: Any, caller: Caller, tokenizer: Any, model: str) -> None: ...

    @abstractmethod
    def response(self, choices: list[Choice]) -> ResponseModel: ...

    @abstractmethod
    def on_start(self) -> Iterable[Event]: ...

    @abstractmethod
    def on_delta(self, delta: Delta) -> Iterable[Event]: ...

    @abstractmethod
    def on_choice(self, choice: Choice) -> Iterable[Event]: ...

    @abstractmethod
    def on_end(self, choices: list[Choice]) -> Iterable[Event]: ...

    @abstractmethod
    def on_error(self, error: dict[str, Any]) -> Iterable[Event]: ...


def event_bytes(event: Event) -> bytes:
    """Returns a server-sent event as it goes over the wire."""
    name, data = event
    return format_sse_event(event=name, data_str=data if isinstance(data, str) else json.dumps(data))
