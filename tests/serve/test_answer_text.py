"""From tokens to text, stop strings and tool calls; whatever the pieces they come in."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from archon.serve.answer_text import AnswerFormat, AnswerParser, StopStringFilter
from archon.serve.call_syntax import ToolCall, json_calls, load_json, valid_calls
from archon.serve.tool_calls import HERMES, Part, merge_adjacent
from tests.data.toy_tokenizers import toy_tokenizer
from tests.serve.scripted import ASKS_WEATHER, WEATHER

TOOL: Any = {"type": "function", "function": WEATHER}


def in_pieces(text: str, seed: int) -> list[str]:
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=5))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read_tools(pieces: list[str]) -> list[Part]:
    reader = HERMES.make({})
    return list(merge_adjacent([part for piece in pieces for part in reader.feed(piece)] + reader.finish()))


ROME = ToolCall("weather", '{"place": "Rome", "days": 2}')
TOOL_TEXTS: dict[str, list[Part]] = {
    ASKS_WEATHER: ["Let me see.", ROME],
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>': [ToolCall("f", "{}")],
    '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n': [
        ToolCall("f", "{}"),
        ToolCall("g", "{}"),
    ],
    'a <tool_call>{"name": "f"}</tool_call> b ': ["a", ToolCall("f", "{}"), "b "],
    "no call, 1 < 2 and <tool": ["no call, 1 < 2 and <tool"],
    "ends in space \n": ["ends in space \n"],
    "": [],
    # What is no call stays as it was written.
    "a \n<tool_call>{broken}</tool_call> b": ["a \n<tool_call>{broken}</tool_call> b"],
    'a <tool_call>{"name": "f", "argu': ['a <tool_call>{"name": "f", "argu'],
    '<tool_call>{"name": 3}</tool_call>': ['<tool_call>{"name": 3}</tool_call>'],
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>': [
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'
    ],
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>': [
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'
    ],
}


@pytest.mark.parametrize("text", TOOL_TEXTS)
def test_tool_calls_are_the_same_in_whatever_pieces_they_come(text: str) -> None:
    assert read_tools([text]) == TOOL_TEXTS[text]
    assert read_tools(list(text)) == TOOL_TEXTS[text]
    for seed in range(20):
        assert read_tools(in_pieces(text, seed)) == TOOL_TEXTS[text]


def test_text_is_given_as_soon_as_it_cannot_be_a_call() -> None:
    reader = HERMES.make({})
    assert reader.feed("1 <") == ["1"]
    assert reader.feed(" 2") == [" < 2"]
    assert reader.feed("<tool_") == []
    assert reader.feed("box") == ["<tool_box"]


@pytest.mark.parametrize("body", ["[" * 100_000, "1e999", '{"name": "f", "arguments": {"x": 1e999}}', "null", "[]"])
def test_what_is_no_call_is_none(body: str) -> None:
    assert valid_calls(json_calls, body, {}) == []


def test_json_is_that_of_the_standard() -> None:
    assert load_json('{"a": [1, "b"]}') == {"a": [1, "b"]}
    for text in ("NaN", "[Infinity]", "-Infinity", "1e999", "[" * 100_000, "{", b"\xff"):
        with pytest.raises(ValueError):
            load_json(text)


@pytest.mark.parametrize(
    ("text", "stops", "said", "found"),
    [
        ("one\nUser: two", ["User:"], "one\n", "User:"),
        ("xyzxyu", ["xyu", "qq"], "xyz", "xyu"),
        ("aab", ["ab"], "a", "ab"),
        ("a|b;c", [";", "|"], "a", "|"),
        ("no stop us", ["use"], "no stop us", None),
        ("none", [], "none", None),
    ],
)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str], said: str, found: str | None) -> None:
    for pieces in ([text], list(text), *(in_pieces(text, seed) for seed in range(20))):
        reader = StopStringFilter(stops)
        assert "".join(map(reader.feed, pieces)) + reader.finish() == said
        assert reader.matched == found


@pytest.mark.parametrize("text", ["Größe 数学 émile 🙂🙃 apples", ASKS_WEATHER, "x\n数<tool_call>\n"])
def test_a_stream_of_tokens_reads_as_the_whole_does(text: str) -> None:
    """Characters of several tokens come out whole, and every token and logprob goes with some piece."""
    tokenizer = toy_tokenizer()
    tokens = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    assert text.isascii() or any("\ufffd" in tokenizer.decode([token]) for token in tokens)
    logprobs = [-float(i) for i in range(len(tokens))]
    for tools in (False, True):
        format = AnswerFormat() if tools else None
        whole = AnswerParser(tokenizer, [], [TOOL], format=format)
        whole.finish(tokens, logprobs)
        streamed = AnswerParser(tokenizer, [], [TOOL], format=format)
        pieces = [piece for token, lp in zip(tokens, logprobs, strict=True) if (piece := streamed.feed(token, lp))]
        pieces.append(streamed.finish(tokens, logprobs))
        assert streamed.parts == whole.parts
        assert [token for piece in pieces for token in piece.tokens] == tokens
        assert [lp for piece in pieces for lp in piece.logprobs] == logprobs
        assert not any("\ufffd" in part for piece in pieces for part in piece.parts if isinstance(part, str))
    assert len(pieces) > 2


def test_bytes_of_no_text_do_not_hold_a_stream_back() -> None:
    tokenizer = toy_tokenizer()
    token = tokenizer.convert_tokens_to_ids("Ġ")  # a space
    lone = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == "\ufffd")
    reader = AnswerParser(tokenizer, [])
    pieces = [reader.feed(lone, 0.0) for _ in range(40)]
    assert sum(piece is not None for piece in pieces) == 2
    assert reader.feed(token, 0.0) is not None


def test_arguments_survive_json(tokenizer: Any) -> None:
    (call,) = json_calls(json.dumps({"name": "f", "arguments": {"text": 'ö\n"', "n": [1, {"m": None}]}}), {})
    assert json.loads(call.arguments) == {"text": 'ö\n"', "n": [1, {"m": None}]}
