"""OpenAI's responses endpoint, stateless: every request holds its whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from archon.serve.answer_text import Delta, Part, ToolCall
from archon.serve.answering import Call, Choice
from archon.serve.api import (
    Api,
    Body,
    Content,
    Count,
    Event,
    FunctionSpec,
    Positive,
    RequestModel,
    ResponseModel,
    prompt_tokens,
    text_of,
    tool_call_message,
)
from archon.serve.openai_chat import TextFormat
from archon.serve.sessions import Caller


class _Item(RequestModel):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


def _kind(item: Any) -> str:
    return str(item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message"))


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponseTool(FunctionSpec):
    type: Literal["function"]

    def for_template(self) -> dict[str, Any]:
        tool = super().for_template()
        del tool["function"]["type"]
        return tool


class TextOptions(RequestModel):
    format: TextFormat | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    previous_response_id: None = Field(None, description="nothing is kept; send the conversation")
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = Field(None, description="without effect: nothing is kept")
    user: str | None = Field(None, description="without effect")

    def changes(self) -> dict[str, Any]:
        return super().changes() | {"max_new_tokens": self.max_output_tokens}

    def messages(self) -> list[dict[str, Any]]:
        """Returns them as chat templates expect them, calls in the same message as the text before them."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        said: dict[str, Any] | None = None  # the assistant's message that further calls belong to
        for number, item in enumerate(self.input):
            if isinstance(item, CallItem):
                if said is None:
                    said = {"role": "assistant", "content": ""}
                    messages.append(said)
                call = tool_call_message(item.call_id, item.name, item.arguments, f"input.{number}")
                said.setdefault("tool_calls", []).append(call)
                continue
            if isinstance(item, CallOutputItem):
                message = {"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id}
            else:
                role = "system" if item.role == "developer" else item.role
                message = {"role": role, "content": text_of(item.content)}
            messages.append(message)
            said = message if message["role"] == "assistant" else None
        return messages


class OutputText(ResponseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field([], max_length=0)
    logprobs: list[Any] = Field([], max_length=0)


class OutputMessage(ResponseModel):
    type: Literal["message"] = "message"
    id: str = Field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed"] = "completed"
    content: list[OutputText]


class OutputCall(ResponseModel):
    type: Literal["function_call"] = "function_call"
    id: str = Field(default_factory=lambda: f"fc_{uuid.uuid4().hex}")
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed"] = "completed"


class ResponseUsage(ResponseModel):
    input_tokens: Count
    input_tokens_details: dict[Literal["cached_tokens"], Count] = {"cached_tokens": 0}  # noqa: RUF012
    output_tokens: Count
    output_tokens_details: dict[Literal["reasoning_tokens"], Count] = {"reasoning_tokens": 0}  # noqa: RUF012
    total_tokens: Count


class OpenAIResponse(ResponseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: Count = Field(default_factory=lambda: int(time.time()))
    model: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    error: None = None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None = None
    instructions: str | None
    max_output_tokens: Count | None
    metadata: dict[str, Any]
    output: list[OutputMessage | OutputCall] = []  # noqa: RUF012 (pydantic copies it)
    parallel_tool_calls: Literal[True] = True
    previous_response_id: None = None
    temperature: float
    text: TextOptions = TextOptions(format=TextFormat(type="text"))
    tool_choice: Literal["auto", "none"]
    tools: list[ResponseTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponsesApi(Api):
    """`POST /v1/responses`."""

    def __init__(self, body: ResponsesBody, caller: Caller, tokenizer: Any, model: str) -> None:
        self.stream = bool(body.stream)
        tools = [] if body.tool_choice == "none" else [tool.for_template() for tool in body.tools or []]
        prompt = prompt_tokens(tokenizer, body.messages(), tools)
        gconfig = body.gconfig(caller.gconfig)
        self.call = Call(f"resp_{uuid.uuid4().hex}", [prompt], gconfig, bool(tools))
        self._response = OpenAIResponse(
            id=self.call.id,
            model=model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=gconfig.top_p,
        )
        self._events = 0

    def response(self, choices: list[Choice]) -> OpenAIResponse:
        self._response.output = [_item(part) for part in choices[0].parts] or [_item("")]
        return self._finished(choices[0])

    def _finished(self, choice: Choice) -> OpenAIResponse:
        cut = choice.response.stop_reason == "length"
        read, sampled = choice.response.input_len, choice.response.output_len
        usage = ResponseUsage(input_tokens=read, output_tokens=sampled, total_tokens=read + sampled)
        details = {"reason": "max_output_tokens"} if cut else None
        status = "incomplete" if cut else "completed"
        return self._response.model_copy(update={"status": status, "incomplete_details": details, "usage": usage})

    def on_start(self) -> Iterable[Event]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def on_delta(self, delta: Delta) -> Iterable[Event]:
        for part in delta.parts:
            if isinstance(part, ToolCall):
                yield from self._close_message()
                yield from self._add_call(part)
            else:
                yield from self._add_text(part)

    def on_choice(self, choice: Choice) -> Iterable[Event]:
        if not self._response.output:
            yield from self._add_text("")
        yield from self._close_message()

    def on_end(self, choices: list[Choice]) -> Iterable[Event]:
        response = self._finished(choices[0])
        yield self._event(f"response.{response.status}", response=response)

    def on_error(self, error: dict[str, Any]) -> Iterable[Event]:
        yield self._event("error", **{name: error["error"][name] for name in ("code", "message", "param")})

    def _event(self, kind: str, **fields: Any) -> Event:
        self._events += 1
        written = {
            name: value.model_dump() if isinstance(value, ResponseModel) else value for name, value in fields.items()
        }
        return kind, {"type": kind, "sequence_number": self._events - 1, **written}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        """Returns an event about the last item."""
        return self._event(kind, output_index=len(self._response.output) - 1, **fields)

    @property
    def _open_message(self) -> OutputMessage | None:
        """The message that is growing."""
        item = self._response.output[-1] if self._response.output else None
        return item if isinstance(item, OutputMessage) and item.status == "in_progress" else None

    def _add_text(self, text: str) -> Iterable[Event]:
        message = self._open_message
        if message is None:
            message = OutputMessage(status="in_progress", content=[])
            self._response.output.append(message)
            yield self._of_item("response.output_item.added", item=message)
            message.content = [OutputText(text="")]
            part = message.content[0]
            yield self._of_item("response.content_part.added", item_id=message.id, content_index=0, part=part)
        message.content[0].text += text
        if text:
            at = {"item_id": message.id, "content_index": 0}
            yield self._of_item("response.output_text.delta", **at, delta=text, logprobs=[])

    def _close_message(self) -> Iterable[Event]:
        message = self._open_message
        if message is None:
            return
        message.status = "completed"
        part, at = message.content[0], {"item_id": message.id, "content_index": 0}
        yield self._of_item("response.output_text.done", **at, text=part.text, logprobs=[])
        yield self._of_item("response.content_part.done", **at, part=part)
        yield self._of_item("response.output_item.done", item=message)

    def _add_call(self, call: ToolCall) -> Iterable[Event]:
        item = _item(call)
        self._response.output.append(item)
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._of_item("response.output_item.added", item=begun)
        yield self._of_item("response.function_call_arguments.delta", item_id=item.id, delta=call.arguments)
        written = {"arguments": call.arguments, "name": call.name}
        yield self._of_item("response.function_call_arguments.done", item_id=item.id, **written)
        yield self._of_item("response.output_item.done", item=item)


def _item(part: Part) -> OutputMessage | OutputCall:
    if isinstance(part, ToolCall):
        return OutputCall(call_id=part.id, name=part.name, arguments=part.arguments)
    return OutputMessage(content=[OutputText(text=part)])
