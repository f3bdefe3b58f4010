"""Parsers of tool calls in a model's text, in the formats of the model families.

A format is selected by name, or by a pattern that only its chat templates contain. Text that is not a valid call stays
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from archon.schema.config import nearest
from archon.schema.errors import ConfigError
from archon.serve.call_syntax import (
    DEEPSEEK,
    PYTHON_TAG,
    TOOL_CALLS,
    CallSyntax,
    Schemas,
    ToolCall,
    deepseek_calls,
    glm_calls,
    in_argument,
    in_json_string,
    in_parameter,
    json_calls,
    llama3_calls,
    make_call,
    mistral_calls,
    python_calls,
    qwen3_coder_calls,
    valid_calls,
)


@dataclass(frozen=True)
class Reasoning:
    """Thinking, which is not part of the visible text."""

    text: str


Part = str | Reasoning | ToolCall


def partial_match(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the start of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


class MarkedParser:
    """Separates calls between two marks from the text around them.

    White space around a call is dropped. An invalid call stays in the text unchanged. The closing mark may be missing
    before the next opening one, and at the end of the answer.

    Args:
        opening: mark before calls.
        closing: mark after calls.
        syntax: syntax of the calls between the marks.
        schemas: schemas of the tools.
        inside_value: tells whether a text ends inside an argument; a closing mark there belongs to the argument.
        first_words: start of a call, which counts as one without the opening mark; None accepts no such call.
        needs_closing: calls that may be incomplete at the end of the answer without the closing mark: all of them, or
            calls without the opening mark.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        syntax: CallSyntax,
        schemas: Schemas,
        inside_value: Callable[[str], bool] = lambda body: False,
        first_words: str | None = None,
        needs_closing: Literal["all", "unopened", "none"] = "none",
    ) -> None:
        self._opening, self._closing, self._syntax, self._schemas = opening, closing, syntax, schemas
        self._inside_value, self._needs_closing = inside_value, needs_closing
        self._starts = [opening] if first_words is None else [opening, first_words]
        self._buffer = ""
        self._before = ""  # white space and opening mark of the call that is being read
        self._searched = 0  # closing marks before this place of the buffer belong to arguments
        self._inside = False
        self._after_call = False

    def feed(self, text: str) -> list[Part]:
        """Return the complete parts so far."""
        self._buffer += text
        parts: list[Part] = []
        while self._read_call(parts) if self._inside else self._find_call(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end."""
        parts: list[Part] = []
        while self._inside:
            unopened = self._opening not in self._before
            if self._needs_closing == "all" or (self._needs_closing == "unopened" and unopened):
                calls = []
            else:
                calls = self._parse(self._buffer)
            self._end_call(parts, calls, len(self._buffer))
            parts += self.feed("")
        self._add_text(parts, self._buffer)
        return parts

    def _find_call(self, parts: list[Part]) -> bool:
        """Read the text up to the next call. Returns whether one begins."""
        starts = [(at, mark) for mark in self._starts if (at := self._buffer.find(mark)) >= 0]
        if starts:
            at, mark = min(starts)
        else:
            at, mark = len(self._buffer) - max(partial_match(self._buffer, mark) for mark in self._starts), ""
        text = self._buffer[:at].rstrip()
        self._add_text(parts, text)
        if not mark:
            self._buffer = self._buffer[len(text) :]
            return False
        body = at + len(mark) if mark == self._opening else at
        self._before, self._buffer, self._inside = self._buffer[len(text) : body], self._buffer[body:], True
        return True

    def _read_call(self, parts: list[Part]) -> bool:
        """Read the calls up to the next closing mark. Returns whether there is one."""
        at = self._buffer.find(self._closing, self._searched)
        if at < 0:
            return False
        self._searched = at + len(self._closing)
        if not self._inside_value(self._buffer[:at]):
            self._end_call(parts, self._parse(self._buffer[:at]), self._searched)
        return True

    def _parse(self, body: str) -> list[ToolCall]:
        calls = valid_calls(self._syntax, body, self._schemas)
        if calls or self._opening not in body:
            return calls
        for text in body.split(self._opening):
            several = valid_calls(self._syntax, text, self._schemas)
            if not several:
                return []
            calls += several
        return calls

    def _end_call(self, parts: list[Part], calls: list[ToolCall], end: int) -> None:
        """Add the calls that end at this place of the buffer; without any, the text up to the next mark."""
        if calls:
            parts += calls
            self._after_call = True
        else:
            marks = ((self._opening, 0), (self._closing, len(self._closing)))
            ends = [at + length for mark, length in marks if (at := self._buffer.find(mark)) >= 0]
            end = min([*ends, len(self._buffer)])
            self._add_text(parts, self._before + self._buffer[:end])
        self._buffer, self._searched, self._inside = self._buffer[end:], 0, False

    def _add_text(self, parts: list[Part], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            parts.append(text)


class OpenEndedParser:
    """Parser of formats in which calls reach to the end of the answer.

    Args:
        mark: mark before calls.
        starts: first characters of calls that begin the answer without the mark.
        syntax: syntax of the calls, with the mark.
        schemas: schemas of the tools.
    """

    def __init__(self, mark: str, starts: tuple[str, ...], syntax: CallSyntax, schemas: Schemas) -> None:
        self._mark, self._starts, self._syntax, self._schemas = mark, starts, syntax, schemas
        self._buffer = ""
        self._is_text = False  # whether the answer begins with text
        self._inside = False

    def feed(self, text: str) -> list[Part]:
        """Return the complete parts so far."""
        self._buffer += text
        start = self._buffer.lstrip()
        expected = not start or start.startswith((*self._starts, self._mark[: len(start)]))
        if self._inside or (expected and not self._is_text):
            return []
        self._is_text, at = True, self._buffer.find(self._mark)
        self._inside = at >= 0
        end = at if self._inside else len(self._buffer) - partial_match(self._buffer, self._mark)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return [text] if text else []

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end."""
        if not self._buffer:
            return []
        return [*valid_calls(self._syntax, self._buffer, self._schemas)] or [self._buffer]


CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HARMONY_STARTS = (START, CHANNEL, " to=")
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
_OTHER_ROLE = re.compile(rf"{re.escape(START)}(?!assistant)")


class HarmonyParser:
    """Parser of OpenAI's harmony format, used by gpt-oss.

    A message is a header up to `<|message|>`, with a channel and an optional recipient, then text up to an end mark.
    The channel `analysis` is reasoning, a message to a function is a call, and everything else is text. A call with
    arguments that are not a JSON object is text too. Messages of other roles, such as a tool's result that the model
    invents after its call, are left out.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
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
        elif self._buffer.strip():
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
        if recipient is None or _OTHER_ROLE.match(self._header):
            self._add(parts, text)
            return
        prefix, name = recipient.groups()
        is_call = prefix is not None or name in self._schemas
        calls = valid_calls(lambda body, _: [make_call(name, body)], text, {}) if is_call else []
        parts += calls or [self._header + MESSAGE + text]

    def _add(self, parts: list[Part], text: str) -> None:
        if text and not _OTHER_ROLE.match(self._header):
            parts.append(Reasoning(text) if f"{CHANNEL}analysis" in self._header else text)


Parser = MarkedParser | OpenEndedParser | HarmonyParser


@dataclass(frozen=True)
class CallForm:
    """Syntax of tool calls in a chat template, for constrained answers.

    Attributes:
        before: text before the name of a call.
        between: text between name and arguments.
        after: text after the arguments.
        parameter: texts before a parameter's name, between name and value, and after the value, for arguments as bare
            text; None: the arguments are one JSON object.
        opening: text before all calls.
        closing: text after all calls.
        separator: text between calls; None: the format allows one call per answer.
        template_pattern: regular expression that matches only chat templates with this form of the format.
    """

    before: str
    between: str
    after: str
    parameter: tuple[str, str, str] | None = None
    opening: str = ""
    closing: str = ""
    separator: str | None = "\n"
    template_pattern: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """Tool-call format of a family.

    Attributes:
        name: name for configurations.
        template_pattern: regular expression that matches only this family's chat templates.
        make: returns a parser for one answer from the tools' schemas.
        marks: special tokens of the format, which are kept in the parsed text.
        forms: syntaxes of calls; the first one that matches the template is used. Empty: calls cannot be constrained.
    """

    name: str
    template_pattern: str
    make: Callable[[Schemas], Parser]
    marks: tuple[str, ...] = ()
    forms: tuple[CallForm, ...] = ()

    def form(self, template: str) -> CallForm | None:
        """Return the syntax of calls in a chat template; None if calls cannot be constrained."""
        return next((form for form in self.forms if re.search(form.template_pattern, template)), None)


def _marked_parser(opening: str, closing: str, syntax: CallSyntax, **options: Any) -> Callable[[Schemas], Parser]:
    return lambda schemas: MarkedParser(opening, closing, syntax, schemas, **options)


TAGS = ("<tool_call>", "</tool_call>")
LFM2_TAGS = ("<|tool_call_start|>", "<|tool_call_end|>")
HERMES = ToolFormat(
    "hermes",
    r"<tool_call>",
    _marked_parser(*TAGS, json_calls, inside_value=in_json_string, first_words='{"name"', needs_closing="unopened"),
    TAGS,
    (CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),),
)
HARMONY = ToolFormat(
    "harmony",
    r"<\|channel\|>",
    HarmonyParser,
    (CHANNEL, MESSAGE, START, *_HARMONY_ENDS, "<|constrain|>"),
    (CallForm(" to=functions.", f"{CHANNEL}commentary json{MESSAGE}", "", separator=None),),
)
# Ordered: later patterns may also match the templates of earlier formats.
FORMATS = (
    HARMONY,
    ToolFormat(
        "deepseek_v3",
        DEEPSEEK["call▁begin"],
        _marked_parser(DEEPSEEK["calls▁begin"], DEEPSEEK["calls▁end"], deepseek_calls),
        tuple(DEEPSEEK.values()),
        (
            CallForm(
                f"{DEEPSEEK['call▁begin']}function{DEEPSEEK['sep']}",
                "\n```json\n",
                f"\n```{DEEPSEEK['call▁end']}",
                opening=DEEPSEEK["calls▁begin"],
                closing=DEEPSEEK["calls▁end"],
                template_pattern="```json",
            ),
            CallForm(
                DEEPSEEK["call▁begin"],
                DEEPSEEK["sep"],
                DEEPSEEK["call▁end"],
                opening=DEEPSEEK["calls▁begin"],
                closing=DEEPSEEK["calls▁end"],
                separator="",
            ),
        ),
    ),
    ToolFormat(
        "glm45",
        r"<arg_key>",
        _marked_parser(*TAGS, glm_calls, inside_value=in_argument, needs_closing="all"),
        (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        (CallForm("<tool_call>", "\n", "</tool_call>", ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),),
    ),
    ToolFormat(
        "qwen3_coder",
        r"<function=",
        _marked_parser(*TAGS, qwen3_coder_calls, inside_value=in_parameter, first_words="<function="),
        TAGS,
        (
            CallForm(
                "<tool_call>\n<function=",
                ">\n",
                "</function>\n</tool_call>",
                ("<parameter=", ">\n", "\n</parameter>\n"),
            ),
        ),
    ),
    ToolFormat(
        "llama3_json",
        r"<\|python_tag\|>|<\|start_header_id\|>",
        lambda schemas: OpenEndedParser(PYTHON_TAG, ("{", "["), llama3_calls, schemas),
        (PYTHON_TAG,),
        (CallForm('{"name": "', '", "parameters": ', "}", separator=None),),
    ),
    ToolFormat(
        "mistral",
        r"\[TOOL_CALLS\]",
        lambda schemas: OpenEndedParser(TOOL_CALLS, (), mistral_calls, schemas),
        (TOOL_CALLS, "[ARGS]", "[CALL_ID]"),
        (
            CallForm(TOOL_CALLS, "[ARGS]", "", separator="", template_pattern=r"\[ARGS\]"),
            CallForm('{"name": "', '", "arguments": ', "}", opening=f"{TOOL_CALLS}[", closing="]", separator=", "),
        ),
    ),
    ToolFormat(
        "lfm2",
        r"<\|tool_list_start\|>",
        _marked_parser(*LFM2_TAGS, python_calls, inside_value=in_json_string),
        LFM2_TAGS,
    ),
    HERMES,
)


def template_text(tokenizer: Any) -> str:
    """Return the chat template's source, of several templates all; empty without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def tool_format(tokenizer: Any, name: str | None = None) -> ToolFormat | None:
    """Return the format of that name, by default the chat template's.

    None is a format that is not supported: of a template that renders tools and matches no pattern.

    Raises:
        ConfigError: unknown name.
    """
    if name is None:
        template = template_text(tokenizer)
        matches = (candidate for candidate in FORMATS if re.search(candidate.template_pattern, template))
        return next(matches, None if re.search(r"\btools\b", template) else HERMES)
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
