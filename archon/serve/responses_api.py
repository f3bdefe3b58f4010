"""OpenAI's responses endpoint, stateless: every request holds its whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from archon.checkpoint.chat_template import add_thinking_aliases
from archon.serve import protocol
from archon.serve.answer_text import AnswerFormat, Delta
from archon.serve.call_syntax import ToolCall
from archon.serve.content import MultimodalContent, template_content
from archon.serve.prompts import Prompts
from archon.serve.sessions import Caller, ModelChoice
from archon.serve.tool_calls import Part, Reasoning


class _Item(protocol.RequestModel):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MultimodalContent
    phase: str | None = None


class CallItem(_Item):
    """A tool call, sent back by the client."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: MultimodalContent


class ReasoningText(protocol.RequestModel):
    """Text of thinking."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningInput(_Item):
    """Thinking of the model, sent back by the client."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = []  # noqa: RUF012 (pydantic copies it)
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


def _item_type(item: Any) -> str:
    return str(item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message"))


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")],
    Discriminator(_item_type),
]


class ReasoningOptions(protocol.RequestModel):
    """Options of thinking."""

    effort: protocol.Effort | None = None
    summary: Literal["auto"] | None = Field(None, description="the whole reasoning is returned")
    generate_summary: Literal["auto"] | None = None


class ResponseTool(protocol.FunctionSpec):
    """A tool definition."""

    type: Literal["function"]


class NamedTool(protocol.RequestModel):
    """The choice of one tool."""

    type: Literal["function"]
    name: str = Field(min_length=1)


class TextOptions(protocol.RequestModel):
    """Options of the answer text."""

    format: protocol.TextFormat | None = None
    verbosity: Literal["medium"] | None = protocol.optional(description="the model has one")


class ResponseStreamOptions(protocol.RequestModel):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description="without effect")


class ResponsesBody(protocol.Body, protocol.OpenAIHints, protocol.Conversation):
    """`POST /v1/responses`."""

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: protocol.Positive | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(None, description="there is nothing of it")
    reasoning: ReasoningOptions | None = None
    background: Literal[False] | None = None
    max_tool_calls: protocol.Positive | None = Field(None, description="without effect: of built-in tools")
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: protocol.Integer | None = Field(None, ge=0, le=0, description="only sampled tokens have a logprob")
    conversation: None = Field(None, description="nothing is stored; send the conversation")
    previous_response_id: None = Field(None, description="nothing is stored; send the conversation")
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None

    def thinking_mode(self) -> protocol.Thinking | None:
        """Requested thinking, if any."""
        return None if self.reasoning is None else self.reasoning.effort

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them; tool calls join the assistant message before them."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thought: dict[str, Any] = {}  # belongs to the answer that follows it
        for number, item in enumerate(self.input):
            if isinstance(item, ReasoningInput):
                texts = item.content or item.summary
                thought = add_thinking_aliases({"reasoning_content": "".join(text.text for text in texts)})
                messages.append({"role": "assistant", "content": "", **thought})
            elif isinstance(item, CallItem):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = protocol.template_call(item.call_id, item.name, item.arguments, f"input.{number}")
                messages[-1].setdefault("tool_calls", []).append(call)
            elif isinstance(item, CallOutputItem):
                messages.append(
                    {"role": "tool", "content": template_content(item.output), "tool_call_id": item.call_id}
                )
            elif (
                item.role == "assistant" and thought and messages[-1] == {"role": "assistant", "content": "", **thought}
            ):
                messages[-1]["content"] = template_content(item.content)
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": template_content(item.content)})
        return messages

    def text_format(self) -> protocol.TextFormat | None:
        """Return the format of the answer's text."""
        return None if self.text is None else self.text.format

    def forced_tool(self) -> str | bool:
        """Return the name of the forced tool; True if any call is forced."""
        return self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice == "required"

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools for the chat template."""
        return [] if self.tool_choice == "none" else [tool.for_template() for tool in self.tools or []]


class OutputText(protocol.ResponseModel):
    """Text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field([], max_length=0)
    logprobs: list[Any] = Field([], max_length=0)


class OutputMessage(protocol.ResponseModel):
    """The message of the answer."""

    type: Literal["message"] = "message"
    id: str = Field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed"] = "completed"
    content: list[OutputText]


class OutputReasoningText(protocol.ResponseModel):
    """Text of thinking."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(protocol.ResponseModel):
    """Thinking of the answer."""

    type: Literal["reasoning"] = "reasoning"
    id: str = Field(default_factory=lambda: f"rs_{uuid.uuid4().hex}")
    summary: list[Any] = Field([], max_length=0)
    content: list[OutputReasoningText]
    status: Literal["in_progress", "completed"] = "completed"


class OutputCall(protocol.ResponseModel):
    """A tool call of the answer."""

    type: Literal["function_call"] = "function_call"
    id: str = Field(default_factory=lambda: f"fc_{uuid.uuid4().hex}")
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed"] = "completed"


class ResponseUsage(protocol.ResponseModel):
    """Token counts."""

    input_tokens: protocol.Count
    input_tokens_details: dict[Literal["cached_tokens"], protocol.Count] = {"cached_tokens": 0}  # noqa: RUF012
    output_tokens: protocol.Count
    output_tokens_details: dict[Literal["reasoning_tokens"], protocol.Count] = {"reasoning_tokens": 0}  # noqa: RUF012
    total_tokens: protocol.Count


class OpenAIResponse(protocol.ResponseModel):
    """The response."""

    id: str
    object: Literal["response"] = "response"
    created_at: protocol.Count = Field(default_factory=lambda: int(time.time()))
    model: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    error: None = None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None = None
    instructions: str | None
    max_output_tokens: protocol.Count | None
    metadata: dict[str, Any]
    output: list[OutputMessage | OutputReasoning | OutputCall] = []  # noqa: RUF012 (pydantic copies it)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    temperature: float
    text: TextOptions
    tool_choice: Literal["auto", "none", "required"] | NamedTool
    tools: list[ResponseTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponsesApi(protocol.ProtocolHandler):
    """`POST /v1/responses`."""

    id_prefix = "resp_"
    _n_events = 0
    _message: OutputMessage | None = None  # the one that the stream is adding text to
    _thought: OutputReasoning | None = None  # the same, of thinking

    def __init__(
        self,
        body: ResponsesBody,
        caller: Caller,
        tokenizer: Any,
        model: ModelChoice,
        format: AnswerFormat,
        prompts: Prompts,
    ) -> None:
        super().__init__(body, caller, tokenizer, model, format, prompts)
        gconfig = self.gconfig
        self._response = OpenAIResponse(
            id=self.id,
            model=model.name,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            text=TextOptions(format=body.text_format() or {"type": "text"}),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=gconfig.top_p,
        )

    def response(self, choices: list[protocol.Choice]) -> OpenAIResponse:
        """Return the response of a finished answer."""
        self._response.output = [_item(part) for part in choices[0].parts] or [_item("")]
        return self._finished(choices[0])

    def _finished(self, choice: protocol.Choice) -> OpenAIResponse:
        read, sampled = choice.response.input_len, choice.response.output_len
        usage = ResponseUsage(input_tokens=read, output_tokens=sampled, total_tokens=read + sampled)
        end: dict[str, Any] = {"status": "completed"}
        if choice.response.stop_reason == "length":
            end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return self._response.model_copy(update={"usage": usage, **end})

    def on_start(self) -> Iterable[bytes]:
        """Return the first events."""
        yield self._event("created", response=self._response)
        yield self._event("in_progress", response=self._response)

    def on_delta(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of a delta."""
        for part in delta.parts:
            if isinstance(part, Reasoning):
                yield from self._close_message()
                yield from self._add_reasoning(part.text)
                continue
            yield from self._close_reasoning()
            if isinstance(part, ToolCall):
                yield from self._close_message()
                yield from self._add_call(part)
            else:
                yield from self._add_text(part)

    def on_choice(self, choice: protocol.Choice) -> Iterable[bytes]:
        """Return the events of a finished answer."""
        yield from self._close_reasoning()
        if not self._response.output:
            yield from self._add_text("")
        yield from self._close_message()
        response = self._finished(choice)
        yield self._event(response.status, response=response)

    def on_error(self, error: dict[str, Any]) -> Iterable[bytes]:
        """Return the events of an error."""
        yield self._event("error", **{name: error["error"][name] for name in ("code", "message", "param")})

    def _event(self, event: str, **fields: Any) -> bytes:
        self._n_events += 1
        event = event if event == "error" else f"response.{event}"
        return protocol.sse({"type": event, "sequence_number": self._n_events - 1, **fields}, event)

    def _item_event(self, event: str, **fields: Any) -> bytes:
        """Return an event about the last item."""
        return self._event(event, output_index=len(self._response.output) - 1, **fields)

    def _text_event(self, event: str, message: OutputMessage, **fields: Any) -> bytes:
        return self._item_event(event, item_id=message.id, content_index=0, **fields)

    def _add_text(self, text: str) -> Iterable[bytes]:
        message = self._message
        if message is None:
            self._message = message = OutputMessage(status="in_progress", content=[])
            self._response.output.append(message)
            yield self._item_event("output_item.added", item=message)
            message.content = [OutputText(text="")]
            yield self._text_event("content_part.added", message, part=message.content[0])
        message.content[0].text += text
        if text:
            yield self._text_event("output_text.delta", message, delta=text, logprobs=[])

    def _close_message(self) -> Iterable[bytes]:
        message, self._message = self._message, None
        if message is None:
            return
        message.status = "completed"
        part = message.content[0]
        yield self._text_event("output_text.done", message, text=part.text, logprobs=[])
        yield self._text_event("content_part.done", message, part=part)
        yield self._item_event("output_item.done", item=message)

    def _add_reasoning(self, text: str) -> Iterable[bytes]:
        thought = self._thought
        if thought is None:
            self._thought = thought = OutputReasoning(status="in_progress", content=[])
            self._response.output.append(thought)
            yield self._item_event("output_item.added", item=thought)
            thought.content = [OutputReasoningText(text="")]
        thought.content[0].text += text
        yield self._item_event("reasoning_text.delta", item_id=thought.id, content_index=0, delta=text)

    def _close_reasoning(self) -> Iterable[bytes]:
        thought, self._thought = self._thought, None
        if thought is None:
            return
        thought.status = "completed"
        whole = thought.content[0].text
        yield self._item_event("reasoning_text.done", item_id=thought.id, content_index=0, text=whole)
        yield self._item_event("output_item.done", item=thought)

    def _add_call(self, call: ToolCall) -> Iterable[bytes]:
        item = OutputCall(call_id=call.id, name=call.name, arguments=call.arguments)
        self._response.output.append(item)
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._item_event("output_item.added", item=begun)
        yield self._item_event("function_call_arguments.delta", item_id=item.id, delta=call.arguments)
        written = {"arguments": call.arguments, "name": call.name}
        yield self._item_event("function_call_arguments.done", item_id=item.id, **written)
        yield self._item_event("output_item.done", item=item)


def _item(part: Part) -> OutputMessage | OutputReasoning | OutputCall:
    if isinstance(part, Reasoning):
        return OutputReasoning(content=[OutputReasoningText(text=part.text)])
    if isinstance(part, ToolCall):
        return OutputCall(call_id=part.id, name=part.name, arguments=part.arguments)
    return OutputMessage(content=[OutputText(text=part)])
