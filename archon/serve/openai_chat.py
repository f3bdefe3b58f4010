"""OpenAI's chat completions and completions."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from archon.data.encoding import encode_prompt
from archon.generation.prompt_scores import PromptScores
from archon.generation.types import GenerationHyperparameters, ModelResponse
from archon.schema.errors import RolloutError
from archon.serve import protocol
from archon.serve.answer_text import AnswerFormat, Delta
from archon.serve.sessions import Caller, ModelChoice
from archon.serve.tool_calls import Part, Reasoning, ToolCall

MAX_CHOICES = 128

FinishReason = Literal["stop", "length", "tool_calls"]
Zero = Annotated[float, Field(ge=0, le=0)]


class StreamOptions(protocol.RequestModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="without effect")


class OpenAISampling(protocol.Body, protocol.OpenAIHints):
    """Sampling fields of chat completions and completions, with vLLM's additions."""

    n: protocol.Integer | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: protocol.Positive | None = None
    stop: protocol.StopString | list[protocol.StopString] | None = None
    seed: protocol.Integer | None = Field(None, ge=0, lt=2**63)
    min_tokens: protocol.Integer | None = Field(None, ge=0)
    stop_token_ids: list[protocol.TokenId] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="return the tokens of prompt and answer as well")
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)


class CalledFunction(protocol.RequestModel):
    name: str
    arguments: str


class SentToolCall(protocol.RequestModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: protocol.Integer | None = None


class _Message(protocol.RequestModel):
    """A message of the conversation. The fields that must be empty are those of an answer that is sent back."""

    name: str | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    refusal: None = None
    audio: None = None
    function_call: None = None


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: protocol.Content | None = None
    reasoning_content: str | None = Field(None, description="what the model thought, for templates that show it")
    tool_calls: list[SentToolCall] | None = None


class InputMessage(_Message):
    role: Literal["system", "developer", "user", "tool"]
    content: protocol.Content
    tool_calls: list[SentToolCall] | None = Field(None, max_length=0)


def _message_tag(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return "assistant" if role == "assistant" else "input"


# Not by `role` itself: readers of the description take a discriminator to have one value per class.
ChatMessage = Annotated[
    Annotated[AssistantMessage, Tag("assistant")] | Annotated[InputMessage, Tag("input")], Discriminator(_message_tag)
]


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    converted: dict[str, Any] = {"role": role, "content": protocol.text_of(message.content)}
    if message.tool_calls:
        converted["tool_calls"] = [
            protocol.template_call(call.id, call.function.name, call.function.arguments, where)
            for call in message.tool_calls
        ]
    kept = message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    return converted | protocol.with_thinking_names(kept)


class ChatTool(protocol.RequestModel):
    type: Literal["function"]
    function: protocol.FunctionSpec


class ChatBody(OpenAISampling, protocol.Conversation):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: protocol.Positive | None = None
    logprobs: bool | None = None
    top_logprobs: protocol.Integer | None = Field(None, ge=0, le=0, description="only sampled tokens have a logprob")
    tools: list[ChatTool] | None = None
    tool_choice: Literal["auto", "none"] | None = Field(None, description="a tool call cannot be forced")
    response_format: protocol.TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = Field(None, description="without effect")
    verbosity: Literal["medium"] | None = Field(None, description="the model has one")
    reasoning_effort: protocol.Effort | None = None

    def wanted_thinking(self) -> protocol.Thinking | None:
        return self.reasoning_effort

    def template_messages(self) -> list[dict[str, Any]]:
        return [_template_message(message, f"messages.{i}") for i, message in enumerate(self.messages)]

    def template_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else [tool.function.for_template() for tool in self.tools or []]


class Usage(protocol.ResponseModel):
    prompt_tokens: protocol.Count
    completion_tokens: protocol.Count
    total_tokens: protocol.Count


class TokenLogprob(protocol.ResponseModel):
    token: str
    logprob: float
    bytes: list[protocol.Count]
    top_logprobs: list[Any] = Field([], max_length=0)


class ChatLogprobs(protocol.ResponseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerToolCall(protocol.ResponseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(protocol.ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = protocol.optional()
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = protocol.optional(min_length=1)


class ChatChoice(protocol.ResponseModel):
    index: protocol.Count
    finish_reason: FinishReason
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    token_ids: list[protocol.Count] | None = protocol.optional()


class ChatCompletion(protocol.ResponseModel):
    """With `return_token_ids` there are also `prompt_token_ids` and each choice's `token_ids`, as from vLLM."""

    id: str
    object: Literal["chat.completion"]
    created: protocol.Count
    model: str
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage
    prompt_token_ids: list[protocol.Count] | None = protocol.optional()


class _Completions(protocol.ProtocolHandler):
    """What both completion endpoints share: streams of chunks that end with `[DONE]`."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, body: Any, caller: Caller, tokenizer: Any, model: ModelChoice, format: AnswerFormat) -> None:
        super().__init__(body, caller, tokenizer, model, format)
        self._logprobs = body.logprobs is not None and body.logprobs is not False  # a completion's 0 asks for them
        self._created = int(time.time())

    def _envelope(self, name: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        return protocol.sse(self._envelope(self.chunk_name, list(choices), **more))

    def _usage(self, choices: Sequence[protocol.Choice]) -> dict[str, int]:
        """Returns the numbers of tokens; each prompt counts once."""
        read, sampled = sum(map(len, self.prompts)), sum(choice.response.output_len for choice in choices)
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}

    def _prompt(self) -> dict[str, Any]:
        """Returns the prompt's fields in a response and in the first chunks."""
        return {}

    def response(self, choices: list[protocol.Choice]) -> dict[str, Any]:
        written = [
            self._with_tokens(
                {"index": choice.index, **self._content(choice), "finish_reason": choice.finish_reason},
                choice.response.output_tokens,
                choice.response.output_logprobs,
            )
            for choice in choices
        ]
        return self._envelope(self.object_name, written, usage=self._usage(choices), **self._prompt())

    def _with_tokens(self, choice: dict[str, Any], tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Returns a choice with its tokens and their logprobs, if the client asked for them."""
        choice["logprobs"] = None
        if self._logprobs:
            texts = [str(self._tokenizer.decode([token])) for token in tokens]
            choice["logprobs"] = self._format_logprobs(choice["index"], texts, logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    def on_end(self, choices: list[protocol.Choice]) -> Iterable[bytes]:
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._chunk(usage=self._usage(choices))
        yield protocol.sse("[DONE]")

    def _has_chunk(self, delta: Delta) -> bool:
        """Returns whether a delta adds anything that the client sees."""
        return bool(delta.parts or (delta.tokens and (self._logprobs or self.body.return_token_ids)))

    @abstractmethod
    def _content(self, choice: protocol.Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _format_logprobs(self, index: int, texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]: ...


class ChatApi(_Completions):
    """`POST /v1/chat/completions`."""

    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, body: ChatBody, caller: Caller, tokenizer: Any, model: ModelChoice, format: AnswerFormat
    ) -> None:
        super().__init__(body, caller, tokenizer, model, format)
        self._n_calls: Counter[int] = Counter()  # tool calls of each choice so far

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0]} if self.body.return_token_ids else {}

    def _content(self, choice: protocol.Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"content": choice.text}
        if choice.calls:
            message = {"content": choice.text or None, "tool_calls": list(map(_tool_call, choice.calls))}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        return {"message": message}

    def _format_logprobs(self, index: int, texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def on_start(self) -> Iterable[bytes]:
        for index in range(self.gconfig.n_samples):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "finish_reason": None}, **self._prompt())

    def on_delta(self, delta: Delta) -> Iterable[bytes]:
        if not self._has_chunk(delta):
            return
        tokens, logprobs = delta.tokens, delta.logprobs
        for message in [self._message(part, delta.index) for part in delta.parts] or [{}]:
            choice = {"index": delta.index, "delta": message, "finish_reason": None}
            yield self._chunk(self._with_tokens(choice, tokens, logprobs))
            tokens, logprobs = [], []  # are in the first chunk only

    def _message(self, part: Part, index: int) -> dict[str, Any]:
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        if not isinstance(part, ToolCall):
            return {"content": part}
        self._n_calls[index] += 1
        return {"tool_calls": [{"index": self._n_calls[index] - 1, **_tool_call(part)}]}

    def on_choice(self, choice: protocol.Choice) -> Iterable[bytes]:
        yield self._chunk({"index": choice.index, "delta": {}, "finish_reason": choice.finish_reason})


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionBody(OpenAISampling):
    """`POST /v1/completions`."""

    prompt: str | list[protocol.TokenId] | list[str] | list[list[protocol.TokenId]] = Field(
        description="text, tokens, or a list of these"
    )
    max_tokens: protocol.Integer | None = Field(None, ge=0, description="0, with echo: no answer")
    logprobs: protocol.Integer | None = Field(
        None, ge=0, le=1, description="0: those of the tokens; 1, with echo: and of the most likely token in each place"
    )
    echo: bool | None = Field(None, description="begin the answer with the prompt, whose logprobs are returned too")
    suffix: None = None

    @model_validator(mode="after")
    def _asks_for_what_there_is(self) -> CompletionBody:
        if self.echo and self.stream:
            raise ValueError("echo is not streamed; leave out stream or echo")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: got 0, which needs echo; ask for at least one token")
        if self.logprobs and not self.echo:
            raise ValueError("logprobs: got 1, which needs echo; without it only sampled tokens have a logprob")
        return self

    def gconfig(self, base: GenerationHyperparameters) -> GenerationHyperparameters:
        """Returns what `Body.gconfig` does; without an answer its length does not matter."""
        body = self.model_copy(update={"max_tokens": None}) if self.max_tokens == 0 else self
        return super(CompletionBody, body).gconfig(base)

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """Returns the prompts in tokens; those in text begin with the tokenizer's special tokens."""
        given: Any = self.prompt
        if isinstance(given, str) or not any(isinstance(item, str | list) for item in given):
            given = [given]
        answers = len(given) * (self.n or 1)
        if answers > MAX_CHOICES:
            raise RolloutError(
                f"{len(given)} prompts with n = {self.n or 1} are {answers} answers; one request may ask for "
                f"{MAX_CHOICES}"
            )
        return [encode_prompt(tokenizer, {"prompt": item}) if isinstance(item, str) else item for item in given]


class CompletionLogprobs(protocol.ResponseModel):
    """The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[protocol.Count]


class CompletionChoice(protocol.ResponseModel):
    index: protocol.Count
    finish_reason: FinishReason
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[protocol.Count] | None = protocol.optional()
    prompt_token_ids: list[protocol.Count] | None = protocol.optional()


class Completion(protocol.ResponseModel):
    """With `return_token_ids` each choice has `token_ids` and `prompt_token_ids`, as from vLLM."""

    id: str
    object: Literal["text_completion"]
    created: protocol.Count
    model: str
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: Usage


class CompletionApi(_Completions):
    """`POST /v1/completions`; choice i answers prompt i // n."""

    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, body: CompletionBody, caller: Caller, tokenizer: Any, model: ModelChoice, format: AnswerFormat
    ) -> None:
        super().__init__(body, caller, tokenizer, model, format)
        self._offsets: Counter[int] = Counter()  # characters of each choice so far, special tokens included
        self._echoed: dict[int, PromptScores] = {}  # of prompt and answer

    async def generate(self) -> AsyncGenerator[Delta | protocol.Choice, None]:
        if self.body.max_tokens == 0:
            n = self.gconfig.n_samples
            for index in range(n * len(self.prompts)):
                response = ModelResponse(self.prompts[index // n], stop_reason="length")
                yield await self._echo(protocol.Choice(index, [], None, response))
            return
        async with aclosing(super().generate()) as items:
            async for item in items:
                if self.body.echo and isinstance(item, protocol.Choice):
                    item = await self._echo(item)
                yield item

    async def _echo(self, choice: protocol.Choice) -> protocol.Choice:
        """Returns the choice, whose prompt and answer are scored at the answer's temperature."""
        score: Callable[..., PromptScores] | None
        score = getattr(self._caller.engine, "score_prompt", None)
        if score is None:
            raise RolloutError("echo: answers of a session that is trained are sampled only; leave echo out")
        tokens = choice.response.input_tokens + choice.response.output_tokens
        adapter = {} if self._adapter is None else {"adapter": self._adapter}
        self._echoed[choice.index] = score(tokens, self.gconfig.temperature, **adapter)
        await asyncio.sleep(0)  # other requests' turn
        return choice

    def _content(self, choice: protocol.Choice) -> dict[str, Any]:
        prompt = {"prompt_token_ids": choice.response.input_tokens} if self.body.return_token_ids else {}
        text = choice.text
        if self.body.echo:
            text = str(self._tokenizer.decode(choice.response.input_tokens, skip_special_tokens=True)) + text
        return {"text": text, **prompt}

    def _with_tokens(self, choice: dict[str, Any], tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        choice = super()._with_tokens(choice, tokens, logprobs)
        index = choice["index"]
        if index in self._echoed and self._logprobs:
            echoed = [*self.prompts[index // self.gconfig.n_samples], *tokens]
            choice["logprobs"] = self._echoed_logprobs(index, [str(self._tokenizer.decode([x])) for x in echoed])
        return choice

    def _echoed_logprobs(self, index: int, texts: Sequence[str]) -> dict[str, Any]:
        scores, self._offsets[index] = self._echoed[index], 0
        found = self._format_logprobs(index, texts, scores.logprobs)
        found["token_logprobs"] = [None, *scores.logprobs][: len(texts)]
        if self.body.logprobs:
            best = [str(self._tokenizer.decode([token])) for token in scores.best_tokens]
            places = zip(texts[1:], scores.logprobs, best, scores.best_logprobs, strict=True)
            found["top_logprobs"] = [None, *({text: own, top: most} for text, own, top, most in places)][: len(texts)]
        return found

    def _format_logprobs(self, index: int, texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets[index])
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}

    def on_delta(self, delta: Delta) -> Iterable[bytes]:
        if self._has_chunk(delta):
            text = "".join(part for part in delta.parts if isinstance(part, str))
            choice = {"index": delta.index, "text": text, "finish_reason": None}
            yield self._chunk(self._with_tokens(choice, delta.tokens, delta.logprobs))

    def on_choice(self, choice: protocol.Choice) -> Iterable[bytes]:
        end = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}
        yield self._chunk(end)
