"""Parses sampled tokens into text and tool calls (Qwen / Hermes format) as they come, up to a stop string."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from archon.generation.detokenizer import Detokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls. `arguments` is a JSON object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


Part = str | ToolCall


@dataclass
class Delta:
    """What new tokens add to answer `index`; tokens of incomplete text come with the next delta."""

    parts: list[Part]
    tokens: list[int]
    logprobs: list[float]
    index: int


def load_json(text: str | bytes) -> Any:
    """Parses JSON strictly: raises ValueError for NaN, Infinity, numbers that overflow, and too deep nesting."""

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


class StopStringFilter:
    """Passes text through up to the first stop string, which is left out; `matched` is that string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._buffer = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        text = self._buffer + text
        matches = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, self.matched = min(matches)
        else:
            end = len(text) - max((_partial_match(text, stop) for stop in self._stops), default=0)
        self._buffer = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Returns the rest of the text, when none follows."""
        return self._buffer if self.matched is None else ""


class ToolCallParser:
    """Separates `<tool_call>{"name": …, "arguments": {…}}</tool_call>` from the text around it.

    White space around a call is dropped. An invalid call stays in the text unchanged.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._space = ""  # before the call that is being read
        self._inside = False
        self._after_call = False

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while True:
            before, tag, after = self._buffer.partition(CLOSE if self._inside else OPEN)
            if not tag:
                break
            self._buffer = after
            if not self._inside:
                text = before.rstrip()
                self._space = before[len(text) :]
                self._add_text(parts, text)
            elif (call := parse_tool_call(before)) is not None:
                parts.append(call)
                self._after_call = True
            else:
                self._add_text(parts, self._space + OPEN + before + CLOSE)
            self._inside = not self._inside
        if not self._inside:
            text = self._buffer[: len(self._buffer) - _partial_match(self._buffer, OPEN)].rstrip()
            self._add_text(parts, text)
            self._buffer = self._buffer[len(text) :]
        return parts

    def finish(self) -> list[Part]:
        """Returns the rest of the text, when none follows."""
        parts: list[Part] = []
        self._add_text(parts, (self._space + OPEN if self._inside else "") + self._buffer)
        return parts

    def _add_text(self, parts: list[Part], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            parts.append(text)


def _partial_match(text: str, mark: str) -> int:
    """Returns how many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def parse_tool_call(body: str) -> ToolCall | None:
    """Returns the call between the tags; None for invalid JSON, and without a name or an object of arguments."""
    try:
        call = load_json(body)
        match call:
            case {"name": str(name)} if isinstance(arguments := call.get("arguments", {}), dict):
                return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        pass
    return None


class AnswerParser:
    """Parses one answer, token by token or at once; both give the same parts.

    Args:
        tokenizer: decodes.
        stops: strings that end the text.
        tools: whether the answer may hold tool calls.
        index: of the answer.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], tools: bool, index: int = 0) -> None:
        self._text, self._stop = Detokenizer(tokenizer, skip_special_tokens=True), StopStringFilter(stops)
        self._tools = ToolCallParser() if tools else None
        self._tokens: list[int] = []  # since the last delta, as are their logprobs
        self._logprobs: list[float] = []
        self._n_read, self._index = 0, index
        self.parts: list[Part] = []  # all so far, with adjacent texts joined

    @property
    def stop_sequence(self) -> str | None:
        """Returns the stop string that ended the text."""
        return self._stop.matched

    def feed(self, token: int, logprob: float) -> Delta | None:
        """Adds a token. Returns the parts that are complete by now, if any."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._n_read += 1
        parts = self._parse(self._stop.feed(self._text.feed(token)))
        return self._delta(parts) if parts else None

    def finish(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Delta:
        """Returns the rest, given all tokens of the answer."""
        rest = tokens[self._n_read :]
        text = "".join(map(self._text.feed, rest)) + self._text.finish() if self._n_read else self._text.decode(rest)
        self._tokens += rest
        self._logprobs += logprobs[self._n_read :]
        parts = self._parse(self._stop.feed(text)) + self._parse(self._stop.finish())
        return self._delta(parts if self._tools is None else parts + self._tools.finish())

    def _parse(self, text: str) -> list[Part]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [text] if text else []

    def _delta(self, parts: list[Part]) -> Delta:
        delta = Delta(parts, self._tokens, self._logprobs, self._index)
        self._tokens, self._logprobs = [], []
        for part in parts:
            if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
                self.parts[-1] += part
            else:
                self.parts.append(part)
        return delta
