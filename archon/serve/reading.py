"""From sampled tokens to what a client reads, as they come: text, stop strings, tool calls (Qwen / Hermes format)."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_LONGEST_UNSETTLED = 16  # tokens; a character has at most four bytes, so that more are bytes of no text


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls. `arguments` is a JSON object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


Part = str | ToolCall


@dataclass
class Piece:
    """What tokens that came in add to an answer; tokens may add nothing yet, and then go with the next piece."""

    parts: list[Part]
    tokens: list[int]
    logprobs: list[float]
    index: int = 0  # of the answer


def load_json(text: str | bytes) -> Any:
    """JSON as its standard has it: no NaN, no Infinity, no number so large that it becomes one. Raises ValueError,
    also for what is nested too deeply."""

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


class TokenText:
    """The text of tokens, special ones left out; a token that ends inside a character waits for the next ones."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # decoding starts here, since a token's text may depend on the one before
        self._read = 0  # tokens whose text is settled

    def feed(self, token: int) -> str:
        self._ids.append(token)
        return self._settle(at_end=False)

    def finish(self) -> str:
        return self._settle(at_end=True)

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of all tokens of an answer at once."""
        return self._decode(tokens)

    def _settle(self, at_end: bool) -> str:
        known, text = self._decode(self._ids[self._context : self._read]), self._decode(self._ids[self._context :])
        late = len(self._ids) - self._read >= _LONGEST_UNSETTLED
        if text.endswith("\ufffd") and not late and not at_end:
            return ""
        self._context, self._read = len(self._ids) if late else self._read, len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class StopText:
    """Text up to the first stop string, which is left out; `found` is that string."""

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
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def parse_tool_call(body: str) -> ToolCall | None:
    """The call that stands between the tags, None where it is none: not JSON, or without a name and an object."""
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
        self._text, self._stop = TokenText(tokenizer), StopText(stops)
        self._tools = ToolText() if tools else None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self.n_read = 0
        self.parts: list[Part] = []  # all so far, with texts joined

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.found

    def feed(self, token: int, logprob: float) -> Piece | None:
        """Add a token; gives back what can be said by now, if anything."""
        self._take([token], [logprob])
        parts = self._parts(self._stop.feed(self._text.feed(token)))
        return self._piece(parts) if parts else None

    def finish(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Piece:
        """The rest, when all tokens of the answer are known."""
        rest, rest_logprobs = tokens[self.n_read :], logprobs[self.n_read :]
        if self.n_read == 0:
            text = self._text.whole(rest)
        else:
            text = "".join(map(self._text.feed, rest)) + self._text.finish()
        self._take(rest, rest_logprobs)
        parts = self._parts(self._stop.feed(text)) + self._parts(self._stop.finish())
        if self._tools is not None:
            parts += self._tools.finish()
        return self._piece(parts)

    def _take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens += tokens
        self._logprobs += logprobs
        self.n_read += len(tokens)

    def _parts(self, text: str) -> list[Part]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [text] if text else []

    def _piece(self, parts: list[Part]) -> Piece:
        piece = Piece(parts, self._tokens, self._logprobs)
        self._tokens, self._logprobs = [], []
        for part in parts:
            if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
                self.parts[-1] += part
            else:
                self.parts.append(part)
        return piece
