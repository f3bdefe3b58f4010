"""Turns sampled tokens into text and tool calls (Qwen / Hermes format) as they come, up to a stop string."""

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
    """What new tokens add to an answer; tokens whose text is not complete come with the next delta."""

    parts: list[Part]
    tokens: list[int]
    logprobs: list[float]
    index: int = 0  # of the answer


def load_json(text: str | bytes) -> Any:
    """Returns JSON as its standard has it: no NaN, no Infinity, no number so large that it becomes one. Raises
    ValueError, also for what is nested too deeply."""

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


class StopText:
    """Passes text on up to the first stop string, which is left out; `found` is that string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        if self.found is not None:
            return ""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            said, self._held = self._held[:place], ""
            return said
        return self._release(len(self._held) - max((_begun(self._held, stop) for stop in self._stops), default=0))

    def finish(self) -> str:
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        said, self._held = self._held[:count], self._held[count:]
        return said


class ToolText:
    """Separates `<tool_call>{"name": …, "arguments": {…}}</tool_call>` from what is said.

    White space around a call belongs to neither. What looks like a call and is none is text, every character of it.
    """

    def __init__(self) -> None:
        self._held = ""
        self._space = ""  # before the call that is being read
        self._inside = False
        self._after_call = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            if not self._inside:
                said = before.rstrip()
                self._space = before[len(said) :]
                self._say(parts, said)
            elif (call := parse_tool_call(before)) is not None:
                parts.append(call)
                self._after_call = True
            else:
                self._say(parts, self._space + OPEN + before + CLOSE)
            self._inside = not self._inside
        if not self._inside:
            held = self._held[: len(self._held) - _begun(self._held, OPEN)].rstrip()
            self._say(parts, held)
            self._held = self._held[len(held) :]
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        self._say(parts, (self._space + OPEN if self._inside else "") + self._held)
        return parts

    def _say(self, parts: list[Part], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            parts.append(text)


def _begun(text: str, mark: str) -> int:
    """Returns how many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def parse_tool_call(body: str) -> ToolCall | None:
    """Returns the call between the tags; None for what is not JSON, or has no name and no object of arguments."""
    try:
        data = load_json(body)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(data["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        return None


class AnswerReader:
    """Reads one answer, token by token or at once; both give the same parts.

    Args:
        tokenizer: decodes.
        stops: strings that end the text.
        tools: whether the answer may hold tool calls.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], tools: bool) -> None:
        self._text, self._stop = Detokenizer(tokenizer, skip_special_tokens=True), StopText(stops)
        self._tools = ToolText() if tools else None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self.n_read = 0
        self.parts: list[Part] = []  # all so far, with texts joined

    @property
    def stop_sequence(self) -> str | None:
        """Returns the stop string that ended the text."""
        return self._stop.found

    def feed(self, token: int, logprob: float) -> Delta | None:
        """Add a token. Returns what is complete by now, if anything."""
        self._take([token], [logprob])
        parts = self._parts(self._stop.feed(self._text.feed(token)))
        return self._delta(parts) if parts else None

    def finish(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Delta:
        """Returns the rest, when all tokens of the answer are known."""
        rest, rest_logprobs = tokens[self.n_read :], logprobs[self.n_read :]
        if self.n_read == 0:
            text = self._text.decode(rest)
        else:
            text = "".join(map(self._text.feed, rest)) + self._text.finish()
        self._take(rest, rest_logprobs)
        parts = self._parts(self._stop.feed(text)) + self._parts(self._stop.finish())
        if self._tools is not None:
            parts += self._tools.finish()
        return self._delta(parts)

    def _take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens += tokens
        self._logprobs += logprobs
        self.n_read += len(tokens)

    def _parts(self, text: str) -> list[Part]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [text] if text else []

    def _delta(self, parts: list[Part]) -> Delta:
        delta = Delta(parts, self._tokens, self._logprobs)
        self._tokens, self._logprobs = [], []
        for part in parts:
            if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
                self.parts[-1] += part
            else:
                self.parts.append(part)
        return delta
