"""Incremental parser of sampled tokens into text, thinking and tool calls, up to a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from archon.generation.detokenizer import Detokenizer
from archon.generation.types import TopLogprobs
from archon.serve.call_syntax import ToolCall
from archon.serve.tool_calls import (
    HARMONY,
    HERMES,
    Part,
    Reasoning,
    ToolFormat,
    merge_adjacent,
    partial_match,
    template_text,
    tool_format,
    tool_schemas,
)


@dataclass
class Delta:
    """New parts of answer `index`; tokens of incomplete text come with the next delta.

    `top_logprobs` has an item for each token, or none at all.
    """

    parts: list[Part]
    tokens: list[int]
    logprobs: list[float]
    index: int
    top_logprobs: list[TopLogprobs] = field(default_factory=list)


class StopStringFilter:
    """Passes text through up to the first stop string, which is left out; `matched` is that string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._buffer = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is certain so far."""
        if self.matched is not None:
            return ""
        text = self._buffer + text
        matches = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, self.matched = min(matches)
        else:
            end = len(text) - max((partial_match(text, stop) for stop in self._stops), default=0)
        self._buffer = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Return the remaining text at the end."""
        return self._buffer if self.matched is None else ""


@dataclass(frozen=True)
class AnswerFormat:
    """Answer format of a model.

    Attributes:
        tools: format of its tool calls; None if it is not supported.
        has_thinking: whether it thinks between `<think>` and `</think>`.
        dropped: special tokens to omit before parsing, if others are marks of tool calls or thinking; else empty.
    """

    tools: ToolFormat | None = HERMES
    has_thinking: bool = False
    dropped: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any, tool_call_parser: str | None = None) -> AnswerFormat:
        """Return the format implied by the chat template, with the tool-call format `tool_call_parser` if set.

        Raises:
            ConfigError: unknown parser name.
        """
        tools = tool_format(tokenizer, tool_call_parser)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {number: token.content for number, token in added.items() if token.special}
        has_thinking = THINK[1] in template_text(tokenizer) and tools is not HARMONY
        marks = (*(() if tools is None else tools.marks), *(THINK if has_thinking else ()))
        dropped = frozenset(number for number, text in special.items() if text not in marks)
        return cls(tools, has_thinking, dropped if len(dropped) < len(special) else frozenset())


THINK = ("<think>", "</think>")


class ThinkingParser:
    """Parser that separates leading thinking from the answer, and strips the line breaks around both.

    Args:
        inside: whether the prompt ends with `<think>`, so that the answer starts inside.
    """

    def __init__(self, inside: bool) -> None:
        self._buffer = ""
        self._state = "inside" if inside else "before"
        self._started = False  # whether any text of the present state was returned

    def feed(self, text: str) -> list[Part]:
        """Return the complete parts so far."""
        self._buffer += text
        parts: list[Part] = []
        if self._state == "before":
            start = self._buffer.lstrip()
            if not start or any(mark.startswith(start) and start != mark for mark in THINK):
                return []
            if start.startswith(THINK[0]):
                self._state, self._buffer = "inside", start[len(THINK[0]) :]
            elif start.startswith(THINK[1]):  # no thinking, and its first mark is missing
                self._state, self._buffer = "after", start[len(THINK[1]) :]
            else:
                self._state, self._started = "after", True
        if self._state == "inside":
            thought, mark, answer = self._buffer.partition(THINK[1])
            kept = "" if mark else thought[len(thought) - partial_match(thought, THINK[1]) :]
            thought = thought[: len(thought) - len(kept)]
            ready = thought.rstrip("\n")
            self._buffer = answer if mark else thought[len(ready) :] + kept
            ready = ready if self._started else ready.lstrip("\n")
            if ready:
                self._started = True
                parts.append(Reasoning(ready))
            if not mark:
                return parts
            self._state, self._started = "after", False
        said = self._buffer if self._started else self._buffer.lstrip("\n")
        self._buffer = ""
        if said:
            self._started = True
            parts.append(said)
        return parts

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end."""
        remaining, self._buffer = self._buffer, ""
        if self._state == "inside":
            remaining = remaining.strip("\n")
            return [Reasoning(remaining)] if remaining else []
        return [remaining] if remaining else []


class AnswerParser:
    """Parser of one answer, token by token or at once; both give the same parts.

    Args:
        tokenizer: decodes tokens.
        stops: strings that end the text.
        tools: tools that the answer may call, as the chat template receives them.
        index: index of the answer.
        format: answer format of the model; None: plain text, without calls or thinking.
        inside_thinking: whether the prompt ends with `<think>`.
        single_call: whether tool calls after the first are left out.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        tools: Sequence[Mapping[str, Any]] = (),
        index: int = 0,
        format: AnswerFormat | None = None,
        inside_thinking: bool = False,
        *,
        single_call: bool = False,
    ) -> None:
        self._thinking = ThinkingParser(inside_thinking) if format is not None and format.has_thinking else None
        self._tools = None
        if format is not None and format.tools is not None and (tools or format.tools is HARMONY):
            self._tools = format.tools.make(tool_schemas(tools))
        is_plain = self._tools is None and self._thinking is None
        self._dropped = frozenset() if format is None or is_plain else format.dropped
        self._text = Detokenizer(tokenizer, skip_special_tokens=not self._dropped)
        self._stop = StopStringFilter(stops)
        self._tokens: list[int] = []  # since the last delta, as are their logprobs
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._n_read, self._index = 0, index
        self._single_call = single_call
        self.parts: list[Part] = []  # all so far, with adjacent texts joined

    @property
    def stop_sequence(self) -> str | None:
        """Returns the stop string that ended the text."""
        return self._stop.matched

    def feed(self, token: int, logprob: float, top_logprobs: TopLogprobs | None = None) -> Delta | None:
        """Add a token. Returns the parts that are complete by now, if any."""
        if top_logprobs is not None:
            self._top_logprobs.append(top_logprobs)
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._n_read += 1
        parts = [] if token in self._dropped else self._parse(self._stop.feed(self._text.feed(token)))
        return self._delta(parts) if parts else None

    def finish(
        self, tokens: Sequence[int], logprobs: Sequence[float], top_logprobs: Sequence[TopLogprobs] = ()
    ) -> Delta:
        """Return the remaining parts from all tokens of the answer."""
        remaining = tokens[self._n_read :]
        shown = [token for token in remaining if token not in self._dropped]
        text = "".join(map(self._text.feed, shown)) + self._text.finish() if self._n_read else self._text.decode(shown)
        self._tokens += remaining
        self._logprobs += logprobs[self._n_read :]
        self._top_logprobs += top_logprobs[self._n_read :]
        parts = self._parse(self._stop.feed(text)) + self._parse(self._stop.finish())
        if self._thinking is not None:
            parts += self._find_calls(self._thinking.finish())
        return self._delta(parts if self._tools is None else parts + self._tools.finish())

    def _parse(self, text: str) -> list[Part]:
        if not text:
            return []
        return self._find_calls([text] if self._thinking is None else self._thinking.feed(text))

    def _find_calls(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts with the tool calls in their texts."""
        if self._tools is None:
            return list(parts)
        new_parts: list[Part] = []
        for part in parts:
            new_parts += self._tools.feed(part) if isinstance(part, str) else [part]
        return new_parts

    def _delta(self, parts: list[Part]) -> Delta:
        if self._single_call:
            calls = [part for part in (*self.parts, *parts) if isinstance(part, ToolCall)]
            parts = [part for part in parts if not isinstance(part, ToolCall) or part is calls[0]]
        delta = Delta(parts, self._tokens, self._logprobs, self._index, self._top_logprobs)
        self._tokens, self._logprobs, self._top_logprobs = [], [], []
        self.parts = list(merge_adjacent([*self.parts, *parts]))
        return delta
