"""Tool calls and thinking in the words of every family, read from text, from tokens and through a server."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest

from archon.checkpoint.chat_template import render, render_calls
from archon.data.encoding import tokenize
from archon.generation.types import GenerationHyperparameters
from archon.rl.bootstrap import make_tokenizer
from archon.schema.errors import ConfigError
from archon.serve import AgentServer
from archon.serve.answer_text import AnswerFormat, AnswerParser, ThinkingParser
from archon.serve.call_syntax import ToolCall, load_json, parse_argument
from archon.serve.tool_calls import FORMATS, Part, Reasoning, merge_adjacent, tool_format
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
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
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
    format = tool_format(None, name)
    assert format is not None
    parser = format.make({"weather": PARAMETERS, "get_time": {}})
    return list(merge_adjacent([part for text in parts for part in parser.feed(text)] + parser.finish()))


@pytest.mark.parametrize(("name", "template"), CASES)
def test_a_template_names_its_format_and_its_calls_are_read_back(name: str, template: str) -> None:
    """In whatever pieces they come; several at once where the family can."""
    tokenizer = family(template)
    assert tool_format(tokenizer) is tool_format(None, name)
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
    "hermes": [
        "<tool_call>{]</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        "<tool_call>" + "[" * 50_000,
        '{"name": "weather", "arguments": {}}',
        *(
            f'<tool_call>{{"name": "f", {arguments}}}</tool_call>'
            for arguments in (
                '"arguments": [1]',
                '"arguments": "{} {}"',
                '"arguments": {"a": ["x" "y"]}',
                '"arguments": {"a": 1,}',
                '"arguments": {"a": nil}',
                '"arguments": {"a": "\\ud800"}',
                '"arguments": {"a": 1}, "parameters": {"a": 2}',
                '"place": "Rome"',
                "'arguments': {'a': 'it's'}",
            )
        ),
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=f\n</tool_call>",
        "<tool_call><function=f><parameter=a>1</tool_call>",
        "<tool_call><function=f>loose text</function></tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=a>cut o",
    ],
    "glm45": [
        "<tool_call>two words<arg_key>a</arg_key></tool_call>",
        "<tool_call>weather<arg_key>place</arg_key></tool_call>",
        "<tool_call>nothing</tool_call>",
        "<tool_call>weather<arg_key>place</arg_key><arg_value>cut before days</arg_value>",
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
        '{"name": "Bob"}',
        '{"name": "Bob", "age": 3}',
        '[{"name": "weather", "parameters": {}}, 3]',
        "[1, 2]",
        "<|python_tag|>weather(place)",
        '<|python_tag|>weather("Rome")',
        '<|python_tag|>os.remove(path="/")',
        'Sure: {"name": "weather", "parameters": {}}',
    ],
    "lfm2": [
        "<|tool_call_start|>[weather(place]<|tool_call_end|>",
        "<|tool_call_start|>[weather(place=Rome)]<|tool_call_end|>",
        "<|tool_call_start|>[unknown(a=1)]<|tool_call_end|>",
        '[weather(place="Rome")]',
    ],
    "mistral": [
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}',
        "[TOOL_CALLS]weather[ARGS]{",
        '[{"name": "weather", "arguments": {}}]',
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
    format = tool_format(None, name)
    assert format is not None
    marks += [
        *format.marks,
        "'",
        '"arguments"',
        "parameters",
        "True",
        "<parameter=f>",
        "</parameter>",
        "[",
        ":",
        "\n",
        "to=functions.f",
        "analysis",
        "<|python_tag|>",
    ]
    for _ in range(300):
        text = "".join(rng.choices(marks, k=rng.randrange(12)))
        whole, split = read(name, [text]), read(name, pieces(text, rng.randrange(99)))
        assert whole == split, text
        assert all(isinstance(load_json(part.arguments), dict) for part in whole if isinstance(part, ToolCall))


ROME, TWO = ToolCall("weather", '{"place": "Rome"}'), ToolCall("weather", '{"days": 2}')
OBJECT = '{"name": "weather", "arguments": {"place": "Rome"}}'
WRITTEN: list[tuple[str, str, list[Part]]] = [
    ("hermes", f"<tool_call>{text}</tool_call>", parts)
    for text, parts in [
        ('{"name": "weather", "parameters": {"place": "Rome"}}', [ROME]),
        ('{"name": "weather", "arguments": "{\\"place\\": \\"Rome\\"}"}', [ROME]),
        ('{"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}', [ROME]),
        ('{"function": "weather", "arguments": {"place": "Rome"}}', [ROME]),
        ('{"name": "get_time", "arguments": null}', [ToolCall("get_time", "{}")]),
        ('{"name": "get_time", "arguments": ""}', [ToolCall("get_time", "{}")]),
        ('{"name": "get_time", "parameters": null}', [ToolCall("get_time", "{}")]),
        (f'[{OBJECT}, {{"name": "weather", "arguments": {{"days": 2}}}}]', [ROME, TWO]),
        (f'{OBJECT}\n{{"name": "weather", "arguments": {{"days": 2}}}}', [ROME, TWO]),
        ("{'name': 'weather', 'arguments': {'place': 'Rome'}}", [ROME]),
        (
            """{"name": "f", "arguments": {"a": True, "b": [None, False], 'c': 'it\\'s "so"', "d": "it\\'s"}}""",
            [ToolCall("f", '{"a": true, "b": [null, false], "c": "it\'s \\"so\\"", "d": "it\'s"}')],
        ),
        ('{"name": "f", "arguments": {"a": "1\n\t2"}}', [ToolCall("f", '{"a": "1\\n\\t2"}')]),
        ('{"name": "f", "arguments": {"a": "</tool_call>"}}', [ToolCall("f", '{"a": "</tool_call>"}')]),
        ('{"name": "f", "arguments": {"a": "<tool_call>"}}', [ToolCall("f", '{"a": "<tool_call>"}')]),
        ("{'name': 'f', 'arguments': {'a': '</tool_call>'}}", [ToolCall("f", '{"a": "</tool_call>"}')]),
        (f"{OBJECT}</tool_call> and <tool_call>{OBJECT}", [ROME, "and", ROME]),
        (f'{{"name": "cut", "argu<tool_call>{OBJECT}', ['<tool_call>{"name": "cut", "argu', ROME]),
        (f'{{"a": "}}</tool_call> so <tool_call>{OBJECT}', ['<tool_call>{"a": "}</tool_call> so', ROME]),
    ]
] + [
    ("hermes", f"Look.\n<tool_call>\n{OBJECT}\n", ["Look.", ROME]),
    ("hermes", f"<tool_call>{OBJECT}<tool_call>{OBJECT}</tool_call>", [ROME, ROME]),
    ("hermes", f"{OBJECT}</tool_call>", [ROME]),
    ("hermes", f"Look. {OBJECT}\n</tool_call>", ["Look.", ROME]),
]  # fmt: skip
CODER = "<function=weather>\n<parameter=place>\nRome\n</parameter>\n</function>"
TWO_VALUES = ToolCall("weather", '{"place": "Rome", "days": 2}')
WRITTEN += [
    ("qwen3_coder", text, parts)
    for text, parts in [
        (f"{CODER}\n</tool_call>", [ROME]),
        (f"Look.\n{CODER}", ["Look.", ROME]),
        (f"<tool_call>{CODER}\n{CODER}</tool_call>", [ROME, ROME]),
        (f"<tool_call>{CODER}<tool_call>{CODER}</tool_call> so", [ROME, ROME, "so"]),
        ("<tool_call><function=weather><parameter=place>Rome</function></tool_call>", [ROME]),
        ("<tool_call><function=weather><parameter=place>Rome</parameter></tool_call>", [ROME]),
        ("<tool_call><function=get_time></tool_call>", [ToolCall("get_time", "{}")]),
        ("<tool_call><function=weather><parameter=place>Rome\n<parameter=days>2</function></tool_call>", [TWO_VALUES]),
    ]
] + [
    ("qwen3_coder", f"<tool_call><function=weather><parameter=place>\n{value}\n</parameter></function></tool_call>",
     [ToolCall("weather", json.dumps({"place": value}))])
    for value in ("a</parameter>b", "<parameter=x>\n</parameter>", "</tool_call>", "x</function> y", "12", "True", "")
]  # fmt: skip
WRITTEN += [
    ("glm45", "<tool_call>get_time</tool_call>", [ToolCall("get_time", "{}")]),
    *(
        ("glm45", f"<tool_call>weather<arg_key>place</arg_key><arg_value>{value}</arg_value></tool_call>",
         [ToolCall("weather", json.dumps({"place": value}))])
        for value in ("a</arg_value>b", "</tool_call>", "[1]")
    ),
    ("llama3_json", f"{OBJECT}; {OBJECT}", [ROME, ROME]),
    ("llama3_json", f"<|python_tag|>{OBJECT}; <|python_tag|>{OBJECT}", [ROME, ROME]),
    ("llama3_json", f"[{OBJECT}, {OBJECT}]", [ROME, ROME]),
    ("llama3_json", f"Look.<|python_tag|>{OBJECT}", ["Look.", ROME]),
    ("llama3_json", "{'type': 'function', 'name': 'weather', 'parameters': {'place': 'Rome'}}", [ROME]),
    ("llama3_json", '{"name": "get_time", "parameters": null}', [ToolCall("get_time", "{}")]),
    ("llama3_json", '<|python_tag|>weather(place="Rome")', [ROME]),
    ("llama3_json", '[weather(place="Rome"), get_time()]', [ROME, ToolCall("get_time", "{}")]),
    ("lfm2", 'Look.<|tool_call_start|>[weather(place="Rome"), get_time()]<|tool_call_end|>',
     ["Look.", ROME, ToolCall("get_time", "{}")]),
    ("lfm2", "<|tool_call_start|>[weather(days=2)]", [TWO]),
    ("mistral", f"Look.[TOOL_CALLS][{OBJECT}]", ["Look.", ROME]),
    ("mistral", f"[TOOL_CALLS]{OBJECT}", [ROME]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"place": "Rome"}[TOOL_CALLS]weather{"days": 2}', [ROME, TWO]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"place": "Rome"}', [ROME]),
    *(
        ("harmony", f"{header}<|message|>{body}<|call|>", [call])
        for header in (
            "<|channel|>commentary to=functions.weather <|constrain|>json",
            "<|channel|>commentary to=weather code",
            "<|channel|>analysis to=functions.weather",
            " to=functions.weather<|channel|>commentary",
            "<|start|>assistant to=functions.weather<|channel|>commentary json",
        )
        for body, call in ((' {"place": "Rome"}', ROME), ("{'days': 2}", TWO), ("", ToolCall("weather", "{}")))
    ),
    ("harmony", "<|channel|>commentary to=functions.weather<|message|>", []),  # cut before the arguments
    ("harmony", "<|channel|>final to=user<|message|>{}<|call|>", ["<|channel|>final to=user<|message|>{}"]),
    ("harmony", '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>{"made": "up"}<|end|>', []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), WRITTEN)
def test_calls_are_read_as_models_write_them(name: str, text: str, expected: list[Part]) -> None:
    for seed in (None, *range(6)):
        assert read(name, pieces(text, seed)) == expected
    assert read(name, [text]) == expected


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "maybe", "maybe"),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, "null", None),
        ({"type": "number"}, "3", 3),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, '{"a": true}', {"a": True}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({}, "3", "3"),
        (None, "3", "3"),
    ],
)
def test_bare_arguments_have_the_types_of_their_schema(schema: Any, text: str, value: Any) -> None:
    parsed = parse_argument(text, schema)
    assert parsed == value and type(parsed) is type(value)


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
    format, logprobs = AnswerFormat.of(tokenizer), [0.0] * len(tokens)
    whole = AnswerParser(tokenizer, [], [TOOL], format=format)
    whole.finish(tokens, logprobs)
    streamed = AnswerParser(tokenizer, [], [TOOL], format=format)
    deltas = [delta for token in tokens if (delta := streamed.feed(token, 0.0)) is not None]
    deltas.append(streamed.finish(tokens, logprobs))
    assert streamed.parts == whole.parts == ["Look.", ToolCall("weather", json.dumps(ARGUMENTS[0]))]
    assert [token for delta in deltas for token in delta.tokens] == tokens


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_thinking_marks_may_be_special_tokens(tools: list[Any]) -> None:
    """A call inside the thinking is not made."""
    tokenizer = family(families.QWEN3, ["<think>", "</think>", "<tool_call>", "</tool_call>"])
    text = f"<think>\nmaybe {CALL}\n</think>\n\nYes."
    tokens = tokenize(tokenizer, text, "answer")["input_ids"]
    parser = AnswerParser(tokenizer, [], tools, format=AnswerFormat.of(tokenizer))
    parser.finish(tokens, [0.0] * len(tokens))
    assert parser.parts == [Reasoning(f"maybe {CALL}"), "Yes."]


async def test_a_template_whose_calls_no_parser_reads_is_named_and_a_parser_may_be_chosen() -> None:
    tokenizer = family(families.UNKNOWN)
    ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
    for parser in (None, "hermes"):
        server = AgentServer(
            tokenizer, Scripted(tokenizer, [CALL] * 2), GenerationHyperparameters(), tool_call_parser=parser
        )
        async with openai_client(await server.start()) as client:
            plain = await client.chat.completions.create(**ask | {"tools": []})
            assert plain.choices[0].message.content == CALL
            if parser is None:
                with pytest.raises(openai.BadRequestError, match=r"tool_call_parser=harmony \| "):
                    await client.chat.completions.create(**ask)
            else:
                answer = await client.chat.completions.create(**ask)
                assert answer.choices[0].finish_reason == "tool_calls"
        await server.close()


async def test_mistrals_ids_come_back_in_its_template() -> None:
    tokenizer = family(families.MISTRAL)
    scripted = Scripted(tokenizer, [f"[TOOL_CALLS][{OBJECT}]", "Sunny."])
    server = AgentServer(tokenizer, scripted, GenerationHyperparameters())
    async with openai_client(await server.start()) as client:
        talk: list[Any] = [{"role": "user", "content": "?"}]
        first = (await client.chat.completions.create(model="m", messages=talk, tools=[TOOL])).choices[0].message
        assert first.tool_calls is not None
        talk += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}]
        second = await client.chat.completions.create(model="m", messages=talk, tools=[TOOL])
    await server.close()
    assert second.choices[0].message.content == "Sunny."


THOUGHTS: list[tuple[str, bool, list[Part]]] = [
    ("<think>\nhm\n</think>\n\nYes.", False, [Reasoning("hm"), "Yes."]),
    ("hm\n\nso\n</think>\n\nYes.\n", True, [Reasoning("hm\n\nso"), "Yes.\n"]),
    ("Yes. <think>no</think>", False, ["Yes. <think>no</think>"]),
    ("<think>\n\n</think>\n\nYes.", False, ["Yes."]),
    ("<think>never ends", False, [Reasoning("never ends")]),
    ("<thin", False, ["<thin"]),
    ("</think>\n\nYes.", False, ["Yes."]),
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
