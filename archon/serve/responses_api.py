"""OpenAI's responses endpoint, without state: every request brings its whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from archon.serve.answering import Call, Choice
from archon.serve.body import (
    Api,
    Body,
    Content,
    Event,
    FunctionSpec,
    Positive,
    RequestModel,
    called,
    prompt_tokens,
    text_of,
)
from archon.serve.openai_chat import TextFormat
from archon.serve.reading import Part, Piece, ToolCall
from archon.serve.sessions import Asker


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
        """As chat templates expect them. Calls that follow the assistant's words belong to the same message."""
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
                call = called(item.call_id, item.name, item.arguments, f"input.{number}")
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


class ResponsesApi(Api):
    """`POST /v1/responses`."""

    body_class = ResponsesBody

    def __init__(self, data: dict[str, Any], asker: Asker, tokenizer: Any, model: str) -> None:
        self._body = body = ResponsesBody.parse(data, source="request")
        self.stream = bool(body.stream)
        tools = [] if body.tool_choice == "none" else [tool.for_template() for tool in body.tools or []]
        prompt = prompt_tokens(tokenizer, body.messages(), tools)
        gconfig = body.gconfig(asker.gconfig)
        self.call = Call(f"resp_{uuid.uuid4().hex}", [prompt], gconfig, bool(tools))
        self._head = {
            "id": self.call.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": gconfig.top_p,
            "truncation": "disabled",
        }
        self._output: list[dict[str, Any]] = []  # items begun so far; the last may still grow
        self._number = 0

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        for part in choices[0].parts:
            self._output.append(_item(part))
        if not self._output:
            self._output.append(_item(""))
        return self._response(choices[0])

    def _response(self, choice: Choice) -> dict[str, Any]:
        cut = choice.response.stop_reason == "length"
        read, sampled = choice.response.input_len, choice.response.output_len
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + sampled,
            },
        }

    def begin(self) -> Iterable[Event]:
        started = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def piece(self, piece: Piece) -> Iterable[Event]:
        for part in piece.parts:
            if isinstance(part, ToolCall):
                yield from self._close()
                yield from self._call(part)
            else:
                yield from self._say(part)

    def ended(self, choice: Choice) -> Iterable[Event]:
        if not self._output:
            yield from self._say("")
        yield from self._close()

    def finish(self, choices: list[Choice]) -> Iterable[Event]:
        response = self._response(choices[0])
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: dict[str, Any]) -> Iterable[Event]:
        yield self._event("error", **{name: error["error"][name] for name in ("code", "message", "param")})

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        """An event about the item that was begun last."""
        item = self._output[-1]
        return self._event(kind, item_id=item["id"], output_index=len(self._output) - 1, **fields)

    @property
    def _open_text(self) -> dict[str, Any] | None:
        """The content of the message that is growing."""
        item = self._output[-1] if self._output else None
        growing = item is not None and item["type"] == "message" and item["status"] == "in_progress"
        return item["content"][0] if item is not None and growing else None

    def _say(self, text: str) -> Iterable[Event]:
        if self._open_text is None:
            item = _item("") | {"status": "in_progress"}
            self._output.append(item)
            begun = {**item, "content": []}
            yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=begun)
            yield self._of_item("response.content_part.added", content_index=0, part=dict(item["content"][0]))
        self._output[-1]["content"][0]["text"] += text
        if text:
            yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _close(self) -> Iterable[Event]:
        content = self._open_text
        if content is None:
            return
        item = self._output[-1]
        item["status"] = "completed"
        yield self._of_item("response.output_text.done", content_index=0, text=content["text"], logprobs=[])
        yield self._of_item("response.content_part.done", content_index=0, part=content)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _call(self, call: ToolCall) -> Iterable[Event]:
        item = _item(call)
        self._output.append(item)
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=begun)
        yield self._of_item("response.function_call_arguments.delta", delta=call.arguments)
        yield self._of_item("response.function_call_arguments.done", arguments=call.arguments, name=call.name)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)


def _item(part: Part) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        return {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": part.id,
            "name": part.name,
            "arguments": part.arguments,
            "status": "completed",
        }
    content = {"type": "output_text", "text": part, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": f"msg_{uuid.uuid4().hex}",
        "role": "assistant",
        "status": "completed",
        "content": [content],
    }
