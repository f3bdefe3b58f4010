"""OpenAI's chat completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from archon.checkpoint.chat_template import add_thinking_aliases
from archon.generation.types import TopLogprobs
from archon.serve import protocol
from archon.serve.answer_text import AnswerFormat, Delta
from archon.serve.call_syntax import ToolCall
from archon.serve.content import MultimodalContent, template_content
from archon.serve.openai_base import CompletionsHandler, FinishReason, OpenAISampling, Usage
from archon.serve.prompts import Prompts
from archon.serve.sessions import Caller, ModelChoice
from archon.serve.token_bytes import TokenBytes
from archon.serve.tool_calls import Part, Reasoning


class CalledFunction(protocol.RequestModel):
    """Name and arguments of a called function."""

    name: str
    arguments: str


class SentFunction(protocol.RequestModel):
    """Name and arguments of a called function, sent back by the client."""

    name: str
    arguments: str | dict[str, Any]


class SentToolCall(protocol.RequestModel):
    """A tool call, sent back by the client."""

    id: str = ""
    type: Literal["function"] = "function"
    function: SentFunction
    index: protocol.Integer | None = None


class _Message(protocol.RequestModel):
    """A message of the conversation. Fields that must be empty belong to an answer that the client sends back."""

    name: str | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    provider_specific_fields: dict[str, Any] | None = Field(None, description="without effect")
    audio: None = None
    function_call: None = None


class AssistantMessage(_Message):
    """An answer of the model, sent back by the client."""

    role: Literal["assistant"]
    content: protocol.Content | None = None
    refusal: str | None = Field(None, description="the content, if there is none")
    reasoning_content: str | None = Field(None, description="thinking of the model, for templates that show it")
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    tool_calls: list[SentToolCall] | None = None


class InputMessage(_Message):
    """A message of the client."""

    role: Literal["system", "developer", "user", "tool"]
    content: MultimodalContent
    refusal: None = None
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
    content = message.refusal if message.content is None else message.content
    converted: dict[str, Any] = {"role": role, "content": template_content(content)}
    if message.tool_calls:
        converted["tool_calls"] = [
            protocol.template_call(call.id, call.function.name, call.function.arguments, where)
            for call in message.tool_calls
        ]
    kept = message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    if isinstance(message, AssistantMessage) and message.reasoning is not None:
        kept.setdefault("reasoning_content", message.reasoning)
    return converted | add_thinking_aliases(kept)


class ChatTool(protocol.RequestModel):
    """A tool definition."""

    type: Literal["function"]
    function: protocol.FunctionSpec
    cache_control: dict[str, Any] | None = Field(None, description="without effect")


class ToolName(protocol.RequestModel):
    """The name of a tool."""

    name: str = Field(min_length=1)


class NamedTool(protocol.RequestModel):
    """The choice of one tool."""

    type: Literal["function"]
    function: ToolName


class ResponseFormat(protocol.RequestModel):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: protocol.JsonSchema | None = None


class ChatBody(OpenAISampling, protocol.Conversation):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: protocol.Positive | None = None
    logprobs: bool | None = None
    top_logprobs: protocol.Integer | None = Field(None, ge=0, le=20, description="needs logprobs")
    add_generation_prompt: bool | None = Field(None, description="start a new answer; the default")
    continue_final_message: bool | None = Field(None, description="continue the last message, an assistant's")
    add_special_tokens: Literal[False] | None = Field(None, description="the chat template writes them")
    echo: Literal[False] | None = None
    functions: list[Any] | None = Field(None, max_length=0, description="replaced by tools")
    function_call: Literal["auto", "none"] | None = Field(None, description="replaced by tool_choice")
    chat_template: protocol.Unsupported = None
    documents: list[Any] | None = Field(None, max_length=0)
    audio: protocol.Unsupported = None
    web_search_options: protocol.Unsupported = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = Field(None, description="without effect")
    verbosity: Literal["medium"] | None = Field(None, description="the model has one")
    reasoning_effort: protocol.Effort | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs: got {self.top_logprobs}, which needs logprobs; set logprobs to true")
        if self.continue_final_message:
            last = self.messages[-1]
            if not isinstance(last, AssistantMessage) or last.tool_calls:
                raise ValueError("continue_final_message: the last message must be the assistant's, without tool calls")
            if self.add_generation_prompt:
                raise ValueError("continue_final_message and add_generation_prompt exclude each other; remove one")
        return self

    def render_options(self) -> dict[str, bool]:
        """Return how the prompt ends: with a new answer, the last message, or the end of the last message."""
        if self.continue_final_message:
            return {"add_generation_prompt": False, "continue_final_message": True}
        return {"add_generation_prompt": self.add_generation_prompt is not False}

    def thinking_mode(self) -> protocol.Thinking | None:
        """Requested thinking, if any."""
        return self.reasoning_effort

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        return [_template_message(message, f"messages.{i}") for i, message in enumerate(self.messages)]

    def text_format(self) -> protocol.TextFormat | None:
        """Return the format of the answer's text."""
        if self.response_format is None:
            return None
        return {**(self.response_format.json_schema or {}), "type": self.response_format.type}

    def forced_tool(self) -> str | bool:
        """Return the name of the forced tool; True if any call is forced."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else choice == "required"

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools for the chat template."""
        return [] if self.tool_choice == "none" else [tool.function.for_template() for tool in self.tools or []]


class TopLogprob(protocol.ResponseModel):
    """Logprob of a likely token. `bytes` are exact, also of a token that is a part of a character."""

    token: str
    logprob: float
    bytes: list[protocol.Count]


class TokenLogprob(TopLogprob):
    """Logprob of a token, and the logprobs of the most likely tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(protocol.ResponseModel):
    """Logprobs of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerToolCall(protocol.ResponseModel):
    """A tool call of the answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(protocol.ResponseModel):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = protocol.optional()
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = protocol.optional(min_length=1)


class ChatChoice(protocol.ResponseModel):
    """One answer."""

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


class ChatApi(CompletionsHandler):
    """`POST /v1/chat/completions`."""

    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        body: ChatBody,
        caller: Caller,
        tokenizer: Any,
        model: ModelChoice,
        format: AnswerFormat,
        prompts: Prompts,
    ) -> None:
        super().__init__(body, caller, tokenizer, model, format, prompts)
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

    def _format_logprobs(
        self,
        token_bytes: TokenBytes,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[TopLogprobs],
    ) -> dict[str, Any]:
        def one(token: int, logprob: float) -> dict[str, Any]:
            return {"token": token_bytes.name(token), "logprob": logprob, "bytes": list(token_bytes(token))}

        tops = top_logprobs or [[] for _ in tokens]
        content = [  # validated one by one: a single call for all would keep Python's lock for 0.5 s
            TokenLogprob.model_validate({**one(token, logprob), "top_logprobs": [one(*pair) for pair in top]})
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def on_start(self) -> Iterable[bytes]:
        """Return the first events."""
        for index in range(self.gconfig.n_samples):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "finish_reason": None}, **self._prompt())

    def on_delta(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of a delta."""
        if not self._has_chunk(delta):
            return
        tokens, logprobs, top_logprobs = delta.tokens, delta.logprobs, delta.top_logprobs
        for message in [self._message(part, delta.index) for part in delta.parts] or [{}]:
            choice = {"index": delta.index, "delta": message, "finish_reason": None}
            yield self._chunk(self._add_tokens(choice, tokens, logprobs, top_logprobs))
            tokens, logprobs, top_logprobs = [], [], []  # are in the first chunk only

    def _message(self, part: Part, index: int) -> dict[str, Any]:
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        if not isinstance(part, ToolCall):
            return {"content": part}
        self._n_calls[index] += 1
        return {"tool_calls": [{"index": self._n_calls[index] - 1, **_tool_call(part)}]}

    def on_choice(self, choice: protocol.Choice) -> Iterable[bytes]:
        """Return the events of a finished answer."""
        yield self._chunk({"index": choice.index, "delta": {}, "finish_reason": choice.finish_reason})


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
