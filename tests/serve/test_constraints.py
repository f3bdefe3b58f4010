"""Answers constrained to JSON, to choices and to tool calls: by published clients, a real server and random weights."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, get_args

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, Field

from archon.data.encoding import tokenize
from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters
from archon.rl.agent_sampling import AgentSampling, SamplingPolicy
from archon.schema.errors import RolloutError
from archon.serve import AgentServer
from archon.serve.answer_text import AnswerFormat
from archon.serve.constraints import GrammarCompiler, choice_grammar
from archon.serve.openai_chat import ChatApi, ChatBody
from archon.serve.prompts import PromptReader
from archon.serve.sessions import Caller, ModelChoice
from tests.data.toy_tokenizers import toy_tokenizer
from tests.generation.test_detokenizer import byte_fallback_tokenizer
from tests.serve import family_templates as families
from tests.serve.scripted import Scripted, Start
from tests.serve.test_clients import anthropic_client, openai_client
from tests.serve.test_server import CHAT, USER, check_error
from tests.serve.test_tool_formats import ARGUMENTS, CASES, MARKS, TIME, TOOL, calls_of, family, said
from tests.small_qwen3 import small_model


class Person(BaseModel):
    """The schema of an answer, small enough for random weights to end it."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4, pattern="^[a-z]+$")
    age: int = Field(ge=0, le=150)
    tags: list[Literal["a", "b"]] = Field(max_length=2)


SCHEMA = Person.model_json_schema()
PLACES: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PLACES}}
NOW: Any = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "additionalProperties": False}},
}


@asynccontextmanager
async def random_weights(tokenizer: Any) -> AsyncIterator[str]:
    """The URL of a server with random weights, and with more embeddings than the tokenizer has tokens."""
    model = small_model(len(tokenizer) + 3, max_seq_len=2048)
    engine = InProcessEngine.from_model(model, tokenizer, max_slots=8, page_size=16, n_pages=512)
    server = AgentServer(tokenizer, engine, GenerationHyperparameters(max_new_tokens=800))
    yield await server.start()
    await server.close()


@pytest.mark.parametrize(
    "make",
    [lambda: family(families.HERMES), toy_tokenizer, byte_fallback_tokenizer],
    ids=["characters", "bytes", "spaces-before-text"],
)
async def test_json_answers_match_their_schema(make: Any) -> None:
    tokenizer = make()
    tokenizer.chat_template = families.HERMES
    async with random_weights(tokenizer) as url, openai_client(url) as client:
        parsed = await client.chat.completions.parse(
            model="m", messages=USER, response_format=Person, n=6, max_tokens=800
        )
        assert all(isinstance(choice.message.parsed, Person) for choice in parsed.choices)
        assert len({choice.message.content for choice in parsed.choices}) > 1
        response = await client.responses.parse(model="m", input="?", text_format=Person)
        assert isinstance(response.output_parsed, Person) and response.text.format is not None
        assert response.text.format.type == "json_schema"
        async with anthropic_client(url) as claude:
            output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
            message = await claude.messages.create(model="m", messages=USER, max_tokens=800, output_config=output)
            Person.model_validate_json(message.content[0].text)


@pytest.mark.parametrize(
    ("path", "constraint", "expected"),
    [
        ("/chat/completions", {"response_format": {"type": "json_object"}, "temperature": 0}, r"(?s)\{.*\}"),
        ("/chat/completions", {"structured_outputs": {"choice": ["yes", 'a "no"\n']}}, 'yes|a "no"\n'),
        ("/chat/completions", {"guided_regex": "[a-c]{2}/x"}, "[a-c]{2}/x"),
        ("/completions", {"structured_outputs": {"regex": r"\d{3}"}}, r"\d{3}"),
        ("/completions", {"guided_json": json.dumps({"const": 7})}, "7"),
        ("/completions", {"guided_choice": ["1", "2"], "logit_bias": {"20": -100}, "top_k": 1}, "[12]"),
    ],
)
async def test_texts_follow_their_constraint(
    serve: Start, client: httpx.AsyncClient, path: str, constraint: dict[str, Any], expected: str
) -> None:
    _, url = await serve()
    prompt = {"prompt": "1"} if path == "/completions" else {"messages": USER}
    for seed in range(3):
        response = await client.post(url + path, json=prompt | constraint | {"max_tokens": 300, "seed": seed})
        [choice] = response.json()["choices"]
        text = choice["text"] if path == "/completions" else choice["message"]["content"]
        assert choice["finish_reason"] == "stop" and re.fullmatch(expected, text), text


def test_a_choice_may_have_any_character() -> None:
    tokenizer = toy_tokenizer()
    text = "\x7f\x85\0\n\u2028🙂"
    constraint = GrammarCompiler(tokenizer).compile(f"start: {choice_grammar([text])}")
    for token in tokenize(tokenizer, text, "answer")["input_ids"]:
        assert constraint.allowed(len(tokenizer))[token]
        constraint.accept(token)


async def test_an_answer_that_is_cut_off_has_the_reason_length(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve()
    body = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}}
    response = await client.post(f"{url}/chat/completions", json=body)
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith("{")


# Tokens that make random weights call at once, as random thinking would hardly end.
CALLS_AT_ONCE = {families.QWEN3: "o", families.HARMONY: " "}


@pytest.mark.parametrize("template", [case.values[1] for case in CASES if case.values[1] != families.QWEN3_THINKING])
async def test_a_model_has_to_call_and_its_calls_are_read(template: str) -> None:
    tokenizer = family(template)
    options: dict[str, Any] = {"model": "m", "messages": USER, "tools": [WEATHER, NOW], "parallel_tool_calls": False}
    if template in CALLS_AT_ONCE:
        options["logit_bias"] = {str(tokenizer(CALLS_AT_ONCE[template]).input_ids[0]): 100}
    async with random_weights(tokenizer) as url, openai_client(url) as client:
        for seed, choice in enumerate([{"type": "function", "function": {"name": "weather"}}, "required", "required"]):
            answer = await client.chat.completions.create(**options, tool_choice=choice, seed=seed)  # type: ignore[arg-type]
            [call] = answer.choices[0].message.tool_calls or []
            assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_time":
                assert choice == "required" and arguments == {}
            else:
                assert arguments["place"] in ("Rome", "Oslo") and arguments.get("days", 1) in range(1, 10)


def check_allowed(tokenizer: Any, text: str, **options: Any) -> None:
    """Check that a request allows an answer with this text, and no text after it."""
    body = ChatBody.model_validate({"messages": USER, **options})
    caller = Caller(Scripted(tokenizer, []), GenerationHyperparameters())
    grammar = ChatApi(
        body, caller, tokenizer, ModelChoice("m"), AnswerFormat.of(tokenizer), body.prompts(PromptReader(tokenizer))
    ).grammar()
    assert grammar is not None
    constraint = GrammarCompiler(tokenizer).compile(grammar)
    for number, token in enumerate(tokenize(tokenizer, text, "answer")["input_ids"]):
        assert constraint.allowed(len(tokenizer))[token], text[:number]
        constraint.accept(token)
    assert constraint.allowed(len(tokenizer))[tokenizer.eos_token_id]


@pytest.mark.parametrize("kind", ["array", ["object", "null"]])
def test_the_arguments_of_a_call_are_an_object_for_any_schema(kind: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    check_allowed(family(families.HERMES), call % "{}", tools=[tool], tool_choice="required")
    for arguments in ("[]", "null"):
        with pytest.raises(AssertionError):
            check_allowed(family(families.HERMES), call % arguments, tools=[tool], tool_choice="required")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("name", "template"), CASES)
def test_the_calls_that_a_template_writes_are_allowed(name: str, template: str, special: bool) -> None:
    tokenizer = family(template, MARKS.get(name) if special else None)
    for group in [[ARGUMENTS[0]], [ARGUMENTS[2]], *([ARGUMENTS] if name not in ("llama3_json", "harmony") else [])]:
        text = said(tokenizer, {"content": "", "tool_calls": calls_of(*group)}).strip("\n").removesuffix("<|call|>")
        thought = "Rome?\n</think>\n\n" if template == families.QWEN3_THINKING else ""
        text = thought + text.removeprefix("<think>\n")
        check_allowed(tokenizer, text, tools=[TOOL, TIME], tool_choice="required")


@pytest.mark.parametrize(
    ("template", "special", "thought"),
    [
        (families.QWEN3, [], '<think>\nA {"name": 1}?\n</think>\n\n'),
        (families.QWEN3, ["<think>", "</think>"], "<think>so</think>"),
        (families.QWEN3_THINKING, [], "so\n</think>\n\n"),
        (families.HARMONY, [], "<|channel|>analysis<|message|>so<|end|><|start|>assistant"),
        (families.HARMONY, MARKS["harmony"], "<|channel|>analysis<|message|>so<|end|><|start|>assistant"),
    ],
)
def test_thinking_before_an_answer_is_free(template: str, special: list[str], thought: str) -> None:
    text = "<|channel|>final<|message|>7" if template == families.HARMONY else "7"
    for start in (thought, *([""] if template != families.QWEN3_THINKING else [])):
        check_allowed(family(template, special), start + text, guided_json={"type": "integer", "maximum": 9})


@pytest.mark.parametrize("name", MARKS)
async def test_marks_of_calls_may_be_special_tokens(name: str) -> None:
    tokenizer = family(families.TEMPLATES[name][0], MARKS[name])
    async with random_weights(tokenizer) as url, openai_client(url) as client:
        answer = await client.chat.completions.create(
            model="m", messages=USER, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, seed=1
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert call.function.name == "weather"


async def test_a_format_of_calls_without_a_grammar_is_refused_by_name(client: httpx.AsyncClient) -> None:
    tokenizer = family("<|tool_list_start|>" + families.HERMES)
    async with random_weights(tokenizer) as url:
        for forced in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            response = await client.post(f"{url}/chat/completions", json=CHAT | {"tools": [WEATHER]} | forced)
            assert "format lfm2 cannot be constrained" in check_error(response, 400)


async def test_with_tools_an_answer_is_a_call_or_the_json(client: httpx.AsyncClient) -> None:
    tokenizer = family(families.HERMES)
    body = {"messages": USER, "tools": [WEATHER], "seed": 1, "parallel_tool_calls": False, "max_tokens": 800}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}}
    async with random_weights(tokenizer) as url:
        for first, reason in (("{", "stop"), ("<", "tool_calls")):
            bias = {"logit_bias": {str(tokenizer(first).input_ids[0]): 100}}
            [choice] = (await client.post(f"{url}/chat/completions", json=body | bias)).json()["choices"]
            assert choice["finish_reason"] == reason
            if reason == "stop":
                Person.model_validate_json(choice["message"]["content"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "any tool, but the tools of the request are: none"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [NOW]}, "'x', but the tools"),
    ({"tool_choice": {"type": "function", "function": {"name": ""}}, "tools": [NOW]}, "at least 1 character"),
    ({"response_format": {"type": "json_schema"}}, "has no schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type: got 'xml'"),
    ({"guided_choice": ["a"], "guided_regex": "b"}, "in 2 ways"),
    ({"guided_regex": "(a" * 3000}, "invalid regular expression: unclosed group"),
    ({"guided_regex": "a(?=b)"}, "invalid regular expression: look-around"),
    ({"guided_json": "{"}, "the JSON schema is not JSON"),
    ({"guided_json": "[]"}, "expected an object"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
    ({"guided_choice": ["\u00e9"]}, "allows none of the model's tokens"),
    *(
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}, reason)
        for schema, reason in (
            ({"type": "text"}, "Invalid type: text"),
            ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
            ({"$ref": "#/$defs/missing"}, "Pointer '/$defs/missing' does not exist"),
            ({"$ref": "https://example.com/schema.json"}, "Default retriever does not fetch resources"),
            ({"$defs": {"q": {"$ref": "#/$defs/q"}}, "$ref": "#/$defs/q"}, "cannot be fulfilled"),
            ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable schema"),
            ({"properties": {f"key{i}": {"type": "string"} for i in range(20_000)}}, "too large"),
        )
    ),
]


async def test_a_constraint_that_cannot_be_met_is_400_and_says_why(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve()
    for body, reason in REFUSED:
        for stream in ({}, {"stream": True}):
            message = check_error(await client.post(f"{url}/chat/completions", json=CHAT | body | stream), 400)
            assert reason in message, (body, message)


async def test_a_constraint_that_ends_before_min_tokens_is_400(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve()
    body = CHAT | {"guided_choice": ["yes"], "min_tokens": 5, "max_tokens": 9}
    assert "ends before min_tokens" in check_error(await client.post(f"{url}/chat/completions", json=body), 400)


async def test_a_continued_message_cannot_be_constrained(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve()
    talk = [*USER, {"role": "assistant", "content": "{"}]
    body = {"messages": talk, "continue_final_message": True, "response_format": {"type": "json_object"}}
    assert "which the answer continues" in check_error(await client.post(f"{url}/chat/completions", json=body), 400)


async def test_answers_without_a_constraint_are_not_affected_by_others(serve: Start) -> None:
    _, url = await serve()
    async with openai_client(url) as client:

        async def ask(**options: Any) -> Any:
            answer = await client.chat.completions.create(
                model="m", messages=USER, seed=5, max_tokens=40, logprobs=True, **options
            )
            return answer.choices[0]

        alone = await ask()
        format: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
        free, *constrained = await asyncio.gather(ask(), ask(response_format=format), ask(response_format=format))
    assert free == alone and constrained[0] == constrained[1]
    assert constrained[0].message.content.startswith("{") and not alone.message.content.startswith("{")


def test_training_refuses_constraints() -> None:
    """Its logprobs are those of the whole distribution."""
    tokenizer, trained = family(families.HERMES), GenerationHyperparameters()
    for mode in get_args(AgentSampling):
        caller = Caller(Scripted(tokenizer, []), trained, SamplingPolicy(mode, trained, lambda line: None))
        body = ChatBody.model_validate({"messages": USER, "guided_choice": ["a"]})
        with pytest.raises(RolloutError, match="answers cannot be constrained"):
            ChatApi(
                body,
                caller,
                tokenizer,
                ModelChoice("m"),
                AnswerFormat.of(tokenizer),
                body.prompts(PromptReader(tokenizer)),
            ).grammar()


async def test_a_stream_is_constrained_too(serve: Start) -> None:
    _, url = await serve()
    async with openai_client(url) as client:
        stream: Any = await client.chat.completions.create(
            model="m", messages=USER, stream=True, extra_body={"guided_choice": ["first", "second"]}
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) in ("first", "second")


async def test_without_the_library_the_extra_is_named(
    serve: Start, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    _, url = await serve()
    response = await client.post(f"{url}/chat/completions", json=CHAT | {"response_format": {"type": "json_object"}})
    assert "llguidance, which is not installed" in check_error(response, 400)
    assert "pip install 'archon-engine[rl]'" in check_error(response, 400)
    assert (await client.post(f"{url}/chat/completions", json=CHAT)).status_code == 200


def test_a_tokenizer_that_cannot_end_an_answer_is_refused() -> None:
    tokenizer = family(families.HERMES)
    tokenizer.chat_template = tokenizer.eos_token = None
    with pytest.raises(RolloutError, match="no end-of-text token"):
        GrammarCompiler(tokenizer).compile('start: "a"')


async def test_anthropic_answers_continue_the_assistants_last_message(serve: Start) -> None:
    _, url = await serve()
    prefill: Any = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "The answer is"}]}]
    async with anthropic_client(url) as claude, openai_client(url) as client:
        message = await claude.messages.create(model="m", messages=prefill, max_tokens=8, extra_body={"temperature": 0})
        count = await claude.messages.count_tokens(model="m", messages=prefill)
        same = await client.chat.completions.create(
            model="m",
            messages=[*USER, {"role": "assistant", "content": "The answer is"}],
            max_tokens=8,
            temperature=0,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
    assert message.content[0].text == same.choices[0].message.content
    assert same.usage is not None and same.usage.prompt_tokens == message.usage.input_tokens == count.input_tokens


async def test_a_forced_call_over_anthropics_and_the_responses_protocol(serve: Start) -> None:
    _, url = await serve()
    async with anthropic_client(url) as claude, openai_client(url) as client:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
            message: Any = await claude.messages.create(
                model="m",
                messages=USER,
                max_tokens=400,
                tools=[{"name": "weather", "input_schema": PLACES}],
                tool_choice=choice,
            )
            [block] = message.content
            assert message.stop_reason == "tool_use" and block.input["place"] in ("Rome", "Oslo")
        response: Any = await client.responses.create(
            model="m",
            input="?",
            max_output_tokens=400,
            tools=[{"type": "function", "name": "weather", "parameters": PLACES, "strict": True}],
            tool_choice={"type": "function", "name": "weather"},
        )
        [item] = response.output
        assert item.type == "function_call" and json.loads(item.arguments)["place"] in ("Rome", "Oslo")
        assert response.tool_choice.name == "weather"
