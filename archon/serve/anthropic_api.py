"""Anthropic's messages endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from archon.checkpoint.chat_template import add_thinking_aliases
from archon.serve import protocol
from archon.serve.answer_text import Delta
from archon.serve.call_syntax import ToolCall
from archon.serve.content import ImageBlock, template_content
from archon.serve.tool_calls import Part, Reasoning, template_text

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class TextBlock(protocol.TextPart):
    """A text block."""

    type: Literal["text"]


class TextSource(protocol.RequestModel):
    """The text of a document."""

    type: Literal["text"] = Field(description="other sources, such as PDF, are not read")
    media_type: Literal["text/plain"]
    data: str


class DocumentBlock(protocol.RequestModel):
    """A document of plain text, which the model reads after its title and context."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None
    citations: dict[Literal["enabled"], Literal[False]] | None = None
    cache_control: dict[str, Any] | None = None

    def text_block(self) -> TextBlock:
        """Return the document as text."""
        lines = [self.title, self.context, self.source.data]
        return TextBlock(type="text", text="\n".join(line for line in lines if line) + "\n")


class RedactedThinkingBlock(protocol.RequestModel):
    """Encrypted thinking of another provider's model, which is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(protocol.RequestModel):
    """A tool call, sent back by the client."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None


ResultBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(protocol.RequestModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = Field(None, description="without effect; describe the error in the content")
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(protocol.RequestModel):
    """Thinking of the model, sent back by the client."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


Block = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(protocol.RequestModel):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(min_length=1, fail_fast=True)]

    def template_messages(self, where: str) -> list[dict[str, Any]]:
        """Return it as chat templates expect it: tool results become separate messages before the text."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[dict[str, Any]] = []
        shown: list[TextBlock | ImageBlock] = []
        calls, thoughts = [], []
        for block in self.content:
            if isinstance(block, TextBlock | ImageBlock):
                shown.append(block)
            elif isinstance(block, DocumentBlock):
                shown.append(block.text_block())
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                calls.append(protocol.template_call(block.id, block.name, block.input, where))
            elif isinstance(block, ToolResultBlock):
                result = {"content": template_content(block.content), "tool_call_id": block.tool_use_id}
                messages.append({"role": "tool", **result})
        if shown or calls or thoughts:
            message: dict[str, Any] = {"role": self.role, "content": template_content(shown)}
            if thoughts:
                message |= add_thinking_aliases({"reasoning_content": "".join(thoughts)})
            messages.append(message | {"tool_calls": calls} if calls else message)
        return messages


class AnthropicTool(protocol.RequestModel):
    """A tool definition."""

    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool for the chat template."""
        return protocol.FunctionSpec(
            name=self.name, description=self.description, parameters=self.input_schema
        ).for_template()


class ToolChoice(protocol.RequestModel):
    """The choice of tools."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = Field(None, min_length=1, description="of the tool, for type tool")
    disable_parallel_tool_use: bool | None = Field(None, description="true: calls after the first are left out")

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(
                f"got type {self.type!r} and name {self.name!r:.80}; set name for type 'tool', and only for it"
            )
        return self


class ThinkingOptions(protocol.RequestModel):
    """Options of thinking."""

    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: protocol.Positive | None = Field(None, description="without effect: max_tokens is the limit")
    display: Literal["summarized"] | None = Field(None, description="the whole thinking is returned")


class ContextManagement(protocol.RequestModel):
    """Edits of the conversation; none is supported."""

    edits: list[Any] = Field([], max_length=0)


class OutputConfig(protocol.RequestModel):
    """Options of the answer."""

    effort: protocol.Effort | None = Field(None, description="for chat templates with reasoning_effort; else no effect")
    format: protocol.TextFormat | None = None


class CountBody(protocol.Conversation):
    """`POST /v1/messages/count_tokens`: the parts of a prompt."""

    model: str = Field("", description="a name from /v1/models; any name if the server has a single model")
    messages: list[AnthropicMessage] = Field(min_length=1, fail_fast=True)
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = Field(None, max_length=0)
    container: protocol.Unsupported = None
    betas: list[str] | None = Field(None, description="without effect")
    cache_control: dict[str, Any] | None = Field(None, description="without effect")

    @model_validator(mode="after")
    def _check_prefill(self) -> CountBody:
        last = self.messages[-1]
        blocks = [] if isinstance(last.content, str) else last.content
        if last.role == "assistant" and not all(isinstance(block, TextBlock) for block in blocks):
            raise ValueError(
                "the last message is the assistant's, which the answer continues; expected only text blocks in it"
            )
        return self

    def render_options(self) -> dict[str, bool]:
        """Return how the prompt ends: by continuing the assistant's last message, or with the start of a new answer."""
        is_prefilled = self.messages[-1].role == "assistant"
        return {"add_generation_prompt": not is_prefilled, "continue_final_message": is_prefilled}

    def forced_tool(self) -> str | bool:
        """Return the name of the forced tool; True if any call is forced."""
        return False if self.tool_choice is None else self.tool_choice.name or self.tool_choice.type == "any"

    def single_call(self) -> bool:
        """Return whether calls after the first are left out."""
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is True

    def thinking_mode(self) -> protocol.Thinking | None:
        """Requested thinking, if any."""
        kind = None if self.thinking is None else self.thinking.type
        return {"disabled": False, "enabled": True}.get(kind or "")

    def template_options(self, tokenizer: Any) -> dict[str, Any]:
        """Return the template's variables, with the requested effort if the template has one."""
        options = super().template_options(tokenizer)
        effort = None if self.output_config is None else self.output_config.effort
        if effort is not None and "reasoning_effort" in template_text(tokenizer):
            options.setdefault("reasoning_effort", effort)
        return options

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        messages = [] if self.system is None else [{"role": "system", "content": protocol.content_text(self.system)}]
        for number, message in enumerate(self.messages):
            messages += message.template_messages(f"messages.{number}")
        return messages

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools for the chat template."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [tool.for_template() for tool in self.tools or []]


class MessagesBody(CountBody, protocol.Body):
    """`POST /v1/messages`."""

    max_tokens: protocol.Positive
    stop_sequences: list[protocol.StopString] | None = None
    inference_geo: str | None = Field(None, description="without effect")
    speed: str | None = Field(None, description="without effect")

    def text_format(self) -> protocol.TextFormat | None:
        """Return the format of the answer's text."""
        return None if self.output_config is None else self.output_config.format


class TextAnswer(protocol.ResponseModel):
    """A text block of the answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingAnswer(protocol.ResponseModel):
    """A thinking block of the answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUse(protocol.ResponseModel):
    """A tool call of the answer."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(protocol.ResponseModel):
    """Token counts."""

    input_tokens: protocol.Count
    output_tokens: protocol.Count


class Message(protocol.ResponseModel):
    """The response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextAnswer | ThinkingAnswer | ToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessagesApi(protocol.ProtocolHandler):
    """`POST /v1/messages`."""

    id_prefix = "msg_"
    _n_blocks = 0  # content blocks so far
    _open: type[TextAnswer | ThinkingAnswer] | None = None  # the kind of the block that the stream is adding to

    def response(self, choices: list[protocol.Choice]) -> Message:
        """Return the response of a finished answer."""
        choice = choices[0]
        return self._message(choice.parts, choice.response.output_len, **_end(choice))

    def _message(self, parts: list[Part], output_tokens: int, **end: Any) -> Message:
        usage = MessageUsage(input_tokens=len(self.prompts[0]), output_tokens=output_tokens)
        content = [_block(part) for part in parts]
        return Message(id=self.id, model=self._model, content=content, usage=usage, **end)

    def on_start(self) -> Iterable[bytes]:
        """Return the first events."""
        yield _event("message_start", message=self._message([], 0, stop_reason=None, stop_sequence=None))

    def on_delta(self, delta: Delta) -> Iterable[bytes]:
        """Return the events of a delta."""
        for part in delta.parts:
            if isinstance(part, ToolCall):
                yield from self._stop_block()
                yield self._start_block(ToolUse(id=part.id, name=part.name, input={}))
                yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": part.arguments})
                yield self._block_event("stop")
            elif isinstance(part, Reasoning):
                yield from self._continue_block(ThinkingAnswer(thinking=""))
                yield self._block_event("delta", delta={"type": "thinking_delta", "thinking": part.text})
            else:
                yield from self._continue_block(TextAnswer(text=""))
                yield self._block_event("delta", delta={"type": "text_delta", "text": part})

    def _continue_block(self, block: TextAnswer | ThinkingAnswer) -> Iterable[bytes]:
        """Begin a block, unless the last one is open and of its kind."""
        if self._open is not type(block):
            yield from self._stop_block()
            self._open = type(block)
            yield self._start_block(block)

    def on_choice(self, choice: protocol.Choice) -> Iterable[bytes]:
        """Return the events of a finished answer."""
        yield from self._stop_block()
        yield _event("message_delta", delta=_end(choice), usage={"output_tokens": choice.response.output_len})
        yield _event("message_stop")

    def on_error(self, error: dict[str, Any]) -> Iterable[bytes]:
        """Return the events of an error."""
        yield protocol.sse(error, "error")

    def _start_block(self, block: TextAnswer | ThinkingAnswer | ToolUse) -> bytes:
        self._n_blocks += 1
        return self._block_event("start", content_block=block)

    def _block_event(self, name: str, **fields: Any) -> bytes:
        return _event(f"content_block_{name}", index=self._n_blocks - 1, **fields)

    def _stop_block(self) -> Iterable[bytes]:
        if self._open is not None:
            self._open = None
            yield self._block_event("stop")


def _event(name: str, **fields: Any) -> bytes:
    return protocol.sse({"type": name, **fields}, name)


def _block(part: Part) -> TextAnswer | ThinkingAnswer | ToolUse:
    if isinstance(part, Reasoning):
        return ThinkingAnswer(thinking=part.text)
    if isinstance(part, ToolCall):
        return ToolUse(id=part.id, name=part.name, input=json.loads(part.arguments))
    return TextAnswer(text=part)


def _end(choice: protocol.Choice) -> dict[str, Any]:
    reason = STOP_REASONS[choice.finish_reason]
    if choice.stop_sequence is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop_sequence}
