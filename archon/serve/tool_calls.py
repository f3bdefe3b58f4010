"""Parsers of tool calls in a model's text, in the formats of the model families.

A format is selected by name, or by a pattern that only its chat templates contain. Text that is not a valid call stays
text.
"""

from __future__ import annotations

import ast
import json
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from archon.schema.config import nearest
from archon.schema.errors import ConfigError


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls. `arguments` is a JSON object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


@dataclass(frozen=True)
class Reasoning:
    """Thinking, which is not part of the visible text."""

    text: str


Part = str | Reasoning | ToolCall
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the tools' parameters, by name."""


def load_json(text: str | bytes) -> Any:
    """Parse JSON strictly: raises ValueError for NaN, Infinity, numbers that overflow, and too deep nesting."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(number: str) -> float:
        if math.isinf(value := float(number)):
            raise ValueError(f"{number:.20} is too large a number")
        return value

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def partial_match(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the start of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _call(name: str, arguments: Any) -> ToolCall:
    """Return a call; raises ValueError unless it has a name and `arguments` is an object of JSON."""
    if not name or not isinstance(arguments, dict):
        raise ValueError("no name, or no object of arguments")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _parse_call(value: Any, key: str = "arguments") -> ToolCall:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        raise ValueError("no object with a name")
    return _call(name, value.get(key, {}))


def hermes_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse `{"name": …, "arguments": {…}}` (Hermes, Qwen2.5, Qwen3)."""
    return [_parse_call(load_json(body))]


def parse_argument(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Parse an argument written as bare text: a string if its schema wants one, else JSON if possible."""
    kinds = (schema or {}).get("type", "string")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if set(kinds) == {"string"}:
        return text
    try:
        return load_json(text)
    except ValueError:
        return text


def _argument_schema(schemas: Schemas, tool: str, name: str) -> Mapping[str, Any] | None:
    properties = schemas.get(tool, {}).get("properties", {})
    schema = properties.get(name) if isinstance(properties, dict) else None
    return schema if isinstance(schema, dict) else None


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def qwen3_coder_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse `<function=NAME><parameter=KEY>VALUE</parameter>…</function>` (Qwen3-Coder, Qwen3.5)."""
    function = _FUNCTION.fullmatch(body)
    if function is None:
        raise ValueError("no function")
    name, parameters = function[1].strip(), function[2]
    if _PARAMETER.sub("", parameters).strip():
        raise ValueError("text between the parameters")
    pairs = [(key.strip(), value) for key, value in _PARAMETER.findall(parameters)]
    return [_call(name, {key: parse_argument(value, _argument_schema(schemas, name, key)) for key, value in pairs})]


_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def glm_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…` (GLM-4.5 and later)."""
    head, mark, remaining = body.partition("<arg_key>")
    name, remaining = head.strip(), mark + remaining
    if re.search(r"[\s<>]", name) or (not mark and name not in schemas) or _ARGUMENT.sub("", remaining).strip():
        raise ValueError("no function")
    pairs = [(key.strip(), value) for key, value in _ARGUMENT.findall(remaining)]
    return [_call(name, {key: parse_argument(value, _argument_schema(schemas, name, key)) for key, value in pairs})]


DEEPSEEK = {name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}
_DEEPSEEK_CALL = re.compile(rf"\s*{DEEPSEEK['call▁begin']}(.*?){DEEPSEEK['sep']}(.*?){DEEPSEEK['call▁end']}", re.DOTALL)
_DEEPSEEK_FENCED = re.compile(r"(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def deepseek_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of DeepSeek-V3 and R1, and of V3.1.

    V3 and R1 write `function`, a separator, the name and fenced JSON; V3.1 writes the name, a separator and JSON. Each
    call has separate marks.
    """
    matches = _DEEPSEEK_CALL.findall(body)
    if not matches or _DEEPSEEK_CALL.sub("", body).strip():
        raise ValueError("no calls")
    calls = []
    for first, second in matches:
        fenced = _DEEPSEEK_FENCED.fullmatch(second) if first.strip() == "function" else None
        name, arguments = (fenced[1], fenced[2]) if fenced is not None else (first.strip(), second)
        calls.append(_call(name, load_json(arguments)))
    return calls


PYTHON_TAG = "<|python_tag|>"


def llama3_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of Llama 3.1 to 3.3.

    They are `{"name": …, "parameters": {…}}`, several with `;` between them, or `name.call(key="value")` for built-in
    tools.
    """
    body = body.removeprefix(PYTHON_TAG).strip()
    if not body.startswith("{"):
        return [_python_call(body)]
    calls, decoder = [], json.JSONDecoder()
    while body:
        try:
            _, end = decoder.raw_decode(body)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        value = load_json(body[:end])
        calls.append(
            _parse_call(value, "parameters" if isinstance(value, dict) and "parameters" in value else "arguments")
        )
        body = body[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _python_call(body: str) -> ToolCall:
    try:
        call = ast.parse(body, mode="eval").body
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="call"), args=[], keywords=keywords):
                return _call(name, {str(word.arg): ast.literal_eval(word.value) for word in keywords if word.arg})
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    raise ValueError("no call")


class MarkedParser:
    """Separates calls between two marks from the text around them.

    White space around a call is dropped. An invalid call stays in the text unchanged.
    """

    def __init__(self, mark: str, end: str, calls: Callable[[str, Schemas], list[ToolCall]], schemas: Schemas) -> None:
        self._open, self._close, self._calls, self._schemas = mark, end, calls, schemas
        self._buffer = ""
        self._space = ""  # before the call that is being read
        self._inside = False
        self._after_call = False

    def feed(self, text: str) -> list[Part]:
        """Return the complete parts so far."""
        self._buffer += text
        parts: list[Part] = []
        while True:
            before, tag, after = self._buffer.partition(self._close if self._inside else self._open)
            if not tag:
                break
            self._buffer = after
            if not self._inside:
                text = before.rstrip()
                self._space = before[len(text) :]
                self._add_text(parts, text)
            elif calls := valid_calls(self._calls, before, self._schemas):
                parts += calls
                self._after_call = True
            else:
                self._add_text(parts, self._space + self._open + before + self._close)
            self._inside = not self._inside
        if not self._inside:
            text = self._buffer[: len(self._buffer) - partial_match(self._buffer, self._open)].rstrip()
            self._add_text(parts, text)
            self._buffer = self._buffer[len(text) :]
        return parts

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end."""
        parts: list[Part] = []
        self._add_text(parts, (self._space + self._open if self._inside else "") + self._buffer)
        return parts

    def _add_text(self, parts: list[Part], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            parts.append(text)


class PrefixCallParser:
    """Parser of formats in which calls start at the first character; any other answer is text."""

    def __init__(self, marks: Sequence[str], calls: Callable[[str, Schemas], list[ToolCall]], schemas: Schemas) -> None:
        self._marks, self._calls, self._schemas = marks, calls, schemas
        self._buffer = ""
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        """Return the complete parts so far."""
        self._buffer += text
        start = self._buffer.lstrip()
        if not self._is_text and (not start or any(start.startswith(mark[: len(start)]) for mark in self._marks)):
            return []
        self._is_text, buffered, self._buffer = True, self._buffer, ""
        return [buffered] if buffered else []

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end."""
        if not self._buffer:
            return []
        return [*valid_calls(self._calls, self._buffer, self._schemas)] or [self._buffer]


def valid_calls(calls: Callable[[str, Schemas], list[ToolCall]], body: str, schemas: Schemas) -> list[ToolCall]:
    """Return the calls of a text; none unless it consists only of valid calls."""
    try:
        return calls(body, schemas)
    except (ValueError, RecursionError):
        return []


CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HARMONY_STARTS = (START, CHANNEL, " to=")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyParser:
    """Parser of OpenAI's harmony format, used by gpt-oss.

    A message is a header up to `<|message|>`, with a channel and an optional recipient, then text up to an end mark.
    The channel `analysis` is reasoning, a message to a function is a call, and everything else is text. A call with
    arguments that are not a JSON object is text too.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._buffer, self._header = "", ""
        self._in_header = True
        self._is_plain_text = False  # whether an answer without any header has begun

    def feed(self, text: str) -> list[Part]:
        """Return the complete parts so far."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end."""
        parts: list[Part] = []
        if self._in_header and not self._is_plain_text:
            if self._buffer and not self._buffer.startswith(_HARMONY_STARTS):
                parts.append(self._buffer)
        elif self._buffer:
            self._end_message(parts, self._buffer)
        self._buffer = ""
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Read the next header or piece of a message. Returns whether more of the buffer may be complete."""
        if self._in_header and not self._is_plain_text:
            return self._read_header(parts)
        ends = [(at, mark) for mark in _HARMONY_ENDS if (at := self._buffer.find(mark)) >= 0]
        if ends:
            at, mark = min(ends)
            self._end_message(parts, self._buffer[:at])
            self._buffer, self._in_header, self._is_plain_text = self._buffer[at + len(mark) :], True, False
            return True
        if _RECIPIENT.search(self._header):
            return False  # a call is returned whole
        kept = max(partial_match(self._buffer, mark) for mark in _HARMONY_ENDS)
        ready = self._buffer[: len(self._buffer) - kept]
        self._buffer = self._buffer[len(ready) :]
        self._add(parts, ready)
        return False

    def _read_header(self, parts: list[Part]) -> bool:
        if not any(mark.startswith(self._buffer[: len(mark)]) for mark in _HARMONY_STARTS):
            self._header, self._is_plain_text = "", True  # no message of the format
            return True
        header, mark, remaining = self._buffer.partition(MESSAGE)
        if not mark:
            return False
        self._header, self._buffer, self._in_header = header, remaining, False
        return True

    def _end_message(self, parts: list[Part], text: str) -> None:
        recipient = _RECIPIENT.search(self._header)
        if recipient is None:
            self._add(parts, text)
            return
        calls = valid_calls(lambda body, _: [_call(recipient[1], load_json(body))], text, {})
        parts += calls or [self._header + MESSAGE + text]

    def _add(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(Reasoning(text) if f"{CHANNEL}analysis" in self._header else text)


Parser = MarkedParser | PrefixCallParser | HarmonyParser


@dataclass(frozen=True)
class ToolFormat:
    """Tool-call format of a family.

    Attributes:
        name: name for configurations.
        template_pattern: regular expression that matches only this family's chat templates.
        make: returns a parser for one answer from the tools' schemas.
        marks: special tokens of the format, which are kept in the parsed text.
    """

    name: str
    template_pattern: str
    make: Callable[[Schemas], Parser]
    marks: tuple[str, ...] = ()


def _marked_parser(mark: str, end: str, calls: Callable[[str, Schemas], list[ToolCall]]) -> Callable[[Schemas], Parser]:
    return lambda schemas: MarkedParser(mark, end, calls, schemas)


TAGS = ("<tool_call>", "</tool_call>")
HERMES = ToolFormat("hermes", r"<tool_call>", _marked_parser(*TAGS, hermes_calls), TAGS)
HARMONY = ToolFormat(
    "harmony", r"<\|channel\|>", HarmonyParser, (CHANNEL, MESSAGE, START, *_HARMONY_ENDS, "<|constrain|>")
)
# Ordered: later patterns may also match the templates of earlier formats.
FORMATS = (
    HARMONY,
    ToolFormat(
        "deepseek_v3",
        DEEPSEEK["call▁begin"],
        _marked_parser(DEEPSEEK["calls▁begin"], DEEPSEEK["calls▁end"], deepseek_calls),
        tuple(DEEPSEEK.values()),
    ),
    ToolFormat(
        "glm45",
        r"<arg_key>",
        _marked_parser(*TAGS, glm_calls),
        (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat("qwen3_coder", r"<function=", _marked_parser(*TAGS, qwen3_coder_calls), TAGS),
    ToolFormat(
        "llama3_json",
        r"<\|python_tag\|>|<\|start_header_id\|>",
        lambda schemas: PrefixCallParser((PYTHON_TAG, "{"), llama3_calls, schemas),
        (PYTHON_TAG,),
    ),
    HERMES,
)


def template_text(tokenizer: Any) -> str:
    """Return the chat template's source, of several templates all; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def tool_format(tokenizer: Any, name: str | None = None) -> ToolFormat:
    """Return the format of that name, by default the chat template's, or Hermes if no pattern matches.

    Raises:
        ConfigError: unknown name.
    """
    if name is None:
        template = template_text(tokenizer)
        return next((candidate for candidate in FORMATS if re.search(candidate.template_pattern, template)), HERMES)
    by_name = {candidate.name: candidate for candidate in FORMATS}
    if name not in by_name:
        raise ConfigError(
            f"tool_call_parser: got {name!r}{nearest(name, list(by_name))}; expected one of {', '.join(by_name)}, or "
            "null for the chat template's own"
        )
    return by_name[name]


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the schemas of tools as chat templates get them."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def merge_adjacent(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield parts with adjacent ones of text, and of reasoning, as one."""
    last: str | Reasoning | None = None
    for part in parts:
        if isinstance(last, str) and isinstance(part, str):
            last += part
        elif isinstance(last, Reasoning) and isinstance(part, Reasoning):
            last = Reasoning(last.text + part.text)
        else:
            if last is not None:
                yield last
            last = None if isinstance(part, ToolCall) else part
            if isinstance(part, ToolCall):
                yield part
    if last is not None:
        yield last
