"""Tool calls and thinking in the words of every family, read from text, from tokens and through a server."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from archon.checkpoint.chat_template import render, render_calls
from archon.data.encoding import tokenize
from archon.generation.types import GenerationHyperparameters
from archon.rl.bootstrap import make_tokenizer
from archon.schema.errors import ConfigError
from archon.serve import AgentServer
from archon.serve.answer_text import AnswerFormat, AnswerParser, ThinkingParser
from archon.serve.tool_calls import FORMATS, Part, Reasoning, ToolCall, load_json, merge_adjacent, tool_format
from archon.training.config import TokenizerRecipe
from tests.serve import family_templates as families
from tests.serve.scripted import Scripted
from tests.serve.test_clients import openai_client

PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
        "note": {"type": ["string", "null"]},
    },
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS: list[dict[str, Any]] = [
    {"place": "Rome", "days": 2},
    {"place": "12", "exact": True, "tags": ["a b", {"c": 1.5}], "note": None},
    {"place": 'two\nlines, "quotes" and <tags>'},
]
MARKS = {
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"],
    "hermes": ["<tool_call>", "</tool_call>"],
}
CASES = [
    pytest.param(name, template, id=f"{name}-{number}")
    for name, templates in families.TEMPLATES.items()
    for number, template in enumerate(templates)
]


def family(template: str, special: list[str] | None = None) -> Any:
    """A tokenizer with that template, one token a character but for the marks that are special tokens."""
    alphabet = "".join(map(chr, range(32, 127))) + "｜▁"
    made = make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="chatml"))
    made.chat_template = template
    if special:
        made.add_special_tokens({"additional_special_tokens": special})
    return made


def said(tokenizer: Any, answer: dict[str, Any]) -> str:
    """The text of an answer, as the model has to write it: what its turn has after the generation prompt."""
    talk = [{"role": "user", "content": "?"}]
    before = render(tokenizer, talk, "prompt", add_generation_prompt=True)
    whole = render_calls(tokenizer, [*talk, {"role": "assistant", **answer}], "turns")
    start = len(before) if whole.startswith(before) else len(before.removesuffix("<think>\n"))
    text = whole[start:]
    for end in ("<|im_end|>\n", "<|eot_id|>", "<|done|>", "<｜end▁of▁sentence｜>"):
        text = text.removesuffix(end)
    return text


def calls_of(*arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": one}} for one in arguments]


def pieces(text: str, seed: int | None) -> list[str]:
    if seed is None:
        return list(text)
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=6))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(name: str, parts: list[str]) -> list[Part]:
    parser = tool_format(None, name).make({"weather": PARAMETERS, "get_time": {}})
    return list(merge_adjacent([part for text in parts for part in parser.feed(text)] + parser.finish()))


@pytest.mark.parametrize(("name", "template"), CASES)
def test_a_template_names_its_format_and_its_calls_are_read_back(name: str, template: str) -> None:
    """In whatever pieces they come; several at once where the family can."""
    tokenizer = family(template)
    assert tool_format(tokenizer).name == name
    groups = [[one] for one in ARGUMENTS] + ([ARGUMENTS] if name != "llama3_json" else [])
    for group in groups:
        text = said(tokenizer, {"content": "", "tool_calls": calls_of(*group)})
        for seed in (None, *range(8)):
            found = read(name, pieces(text, seed))
            assert [(call.name, json.loads(call.arguments)) for call in found if isinstance(call, ToolCall)] == [
                ("weather", one) for one in group
            ], (text, found)
            assert not [part for part in found if isinstance(part, str) and part.strip()]


@pytest.mark.parametrize(("name", "template"), [case for case in CASES if case.values[0] != "llama3_json"])
def test_text_before_a_call_is_text(name: str, template: str) -> None:
    text = said(family(template), {"content": "Let me see.", "tool_calls": calls_of(ARGUMENTS[0])})
    found = read(name, pieces(text, None))
    assert [part for part in found if isinstance(part, str)] == ["Let me see."] and len(found) == 2


BROKEN = {
    "hermes": ["<tool_call>{]</tool_call>", '<tool_call>{"name": 1}</tool_call>', "<tool_call>" + "[" * 50_000],
    "qwen3_coder": [
        "<tool_call>\n<function=f\n</tool_call>",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        "<tool_call><function=f>loose text</function></tool_call>",
    ],
    "glm45": [
        "<tool_call>two words<arg_key>a</arg_key></tool_call>",
        "<tool_call>weather<arg_key>place</arg_key></tool_call>",
        "<tool_call>nothing</tool_call>",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>what<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
    ],
    "llama3_json": [
        '{"name": "f", "parameters": 3}',
        '{"name": "f"',
        '{"a": 1} and text',
        "<|python_tag|>print(1)",
        "<|python_tag|>" + "(" * 20_000,
        "{" * 50_000,
        '{"name": "f", "parameters": {"x": 1e999}}',
    ],
    "harmony": [],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_what_is_no_valid_call_stays_the_text_that_it_is(name: str, text: str) -> None:
    for seed in range(3):
        assert read(name, pieces(text, seed)) == [text]


@pytest.mark.parametrize("name", [found.name for found in FORMATS])
def test_no_text_makes_a_parser_raise_or_lose_what_is_no_mark(name: str) -> None:
    rng = random.Random(name)
    marks = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<arg_key>", "{", "}", '"name"', "x", " "]
    marks += [*tool_format(None, name).marks, "[", ":", "\n", "to=functions.f", "analysis", "<|python_tag|>"]
    for _ in range(300):
        text = "".join(rng.choices(marks, k=rng.randrange(12)))
        whole, split = read(name, [text]), read(name, pieces(text, rng.randrange(99)))
        assert whole == split, text
        assert all(isinstance(load_json(part.arguments), dict) for part in whole if isinstance(part, ToolCall))


def test_llamas_other_forms() -> None:
    assert read("llama3_json", ['<|python_tag|>brave_search.call(query="rome weather")']) == [
        ToolCall("brave_search", '{"query": "rome weather"}')
    ]
    two = '{"name": "weather", "parameters": {"place": "Rome"}}; {"name": "get_time", "parameters": {}}'
    assert read("llama3_json", [two]) == [ToolCall("weather", '{"place": "Rome"}'), ToolCall("get_time", "{}")]
    assert read("llama3_json", ["It is ", "{sunny}"]) == ["It is {sunny}"]


def test_harmony_has_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"place": "Rome"}<|call|>'
    )
    for seed in (None, *range(8)):
        assert read("harmony", pieces(text, seed)) == [
            Reasoning("I should look."),
            "Wait.",
            ToolCall("weather", '{"place": "Rome"}'),
        ]
    assert read("harmony", ["<|channel|>final<|message|>Hello, cut o"]) == ["Hello, cut o"]
    assert read("harmony", ["no header at all"]) == ["no header at all"]
    bad = "<|channel|>commentary to=functions.f<|message|>{]<|call|>"
    assert read("harmony", [bad]) == ["<|channel|>commentary to=functions.f<|message|>{]"]


@pytest.mark.parametrize("name", MARKS)
def test_marks_that_are_special_tokens_are_read_and_others_are_left_out(name: str) -> None:
    tokenizer = family(families.TEMPLATES[name][0], MARKS[name])
    answer = {"content": "Look.", "tool_calls": calls_of(ARGUMENTS[0])}
    text = said(tokenizer, answer)
    tokens = [*tokenize(tokenizer, text, "answer")["input_ids"], tokenizer.pad_token_id, tokenizer.eos_token_id]
    format, logprobs = AnswerFormat.from_tokenizer(tokenizer), [0.0] * len(tokens)
    whole = AnswerParser(tokenizer, [], [TOOL], format=format)
    whole.finish(tokens, logprobs)
    streamed = AnswerParser(tokenizer, [], [TOOL], format=format)
    deltas = [delta for token in tokens if (delta := streamed.feed(token, 0.0)) is not None]
    deltas.append(streamed.finish(tokens, logprobs))
    assert streamed.parts == whole.parts == ["Look.", ToolCall("weather", json.dumps(ARGUMENTS[0]))]
    assert [token for delta in deltas for token in delta.tokens] == tokens


THOUGHTS: list[tuple[str, bool, list[Part]]] = [
    ("<think>\nhm\n</think>\n\nYes.", False, [Reasoning("hm"), "Yes."]),
    ("hm\n\nso\n</think>\n\nYes.\n", True, [Reasoning("hm\n\nso"), "Yes.\n"]),
    ("Yes. <think>no</think>", False, ["Yes. <think>no</think>"]),
    ("<think>\n\n</think>\n\nYes.", False, ["Yes."]),
    ("<think>never ends", False, [Reasoning("never ends")]),
    ("<thin", False, ["<thin"]),
    ("", True, []),
]


@pytest.mark.parametrize(("text", "inside", "expected"), THOUGHTS)
def test_thinking_is_told_from_what_is_said(text: str, inside: bool, expected: list[Part]) -> None:
    for seed in (None, *range(12)):
        parser = ThinkingParser(inside)
        parts = [part for piece in pieces(text, seed) for part in parser.feed(piece)] + parser.finish()
        assert list(merge_adjacent(parts)) == expected


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser: got 'hermez', did you mean 'hermes'"):
        AgentServer(family(families.HERMES), tool_call_parser="hermez")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'


async def test_thinking_goes_out_and_comes_back_in_exact_tokens() -> None:
    tokenizer = family(families.QWEN3)
    scripted = Scripted(tokenizer, [f"<think>\nI look.\n</think>\n\n{CALL}", "<think>\nok\n</think>\n\nSunny."])
    server = AgentServer(tokenizer, scripted, GenerationHyperparameters())
    async with openai_client(await server.start()) as client:
        talk: list[Any] = [{"role": "user", "content": "?"}]
        first = (await client.chat.completions.create(model="m", messages=talk, tools=[TOOL])).choices[0].message
        assert first.content is None and first.reasoning_content == "I look."  # type: ignore[attr-defined]
        assert first.tool_calls is not None
        talk += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}]
        stream = await client.chat.completions.create(model="m", messages=talk, tools=[TOOL], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    await server.close()
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "ok"
    assert "".join(delta.content or "" for delta in deltas) == "Sunny."
    before, after = (request.input_ids for request in scripted.requests)
    answer = tokenize(tokenizer, f"<think>\nI look.\n</think>\n\n{CALL}<|im_end|>", "answer")["input_ids"]
    assert after[: len(before) + len(answer)] == before + answer


@pytest.mark.parametrize(
    "body",
    [
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ],
)
async def test_thinking_is_switched_off_by_the_template(body: dict[str, Any]) -> None:
    tokenizer = family(families.QWEN3)
    scripted = Scripted(tokenizer, ["Sunny.", "Sunny."])
    server = AgentServer(tokenizer, scripted, GenerationHyperparameters())
    async with openai_client(await server.start()) as client:
        for further in ({}, body):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}], **further)
    await server.close()
    on, off = (tokenizer.decode(request.input_ids) for request in scripted.requests)
    assert off == on + "<think>\n\n</think>\n\n"


async def test_the_prompt_may_open_the_thinking_and_the_other_protocols_tell_it_too() -> None:
    import anthropic

    tokenizer = family(families.QWEN3_THINKING)
    scripted = Scripted(tokenizer, ["I look.\n</think>\n\nSunny."] * 4)
    server = AgentServer(tokenizer, scripted, GenerationHyperparameters())
    url = await server.start()
    async with openai_client(url) as client:
        response = await client.responses.create(model="m", input="?")
        thought, message = response.output
        assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "I look."
        assert message.type == "message" and response.output_text == "Sunny."
        events = [event async for event in await client.responses.create(model="m", input="?", stream=True)]
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "I look."
        again: list[Any] = [{"role": "user", "content": "?"}, *response.output, {"role": "user", "content": "and?"}]
        await client.responses.create(model="m", input=again)
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="any", max_retries=0) as claude:
        talk: list[Any] = [{"role": "user", "content": "?"}]
        async with claude.messages.stream(model="m", max_tokens=99, messages=talk) as stream:
            final = await stream.get_final_message()
    await server.close()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == "I look." and final.content[1].text == "Sunny."  # type: ignore[union-attr]
