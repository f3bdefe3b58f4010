"""The clients that agents are written with, as they are published: openai and anthropic, against a live server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout
from archon.rl.workflows.agent import AgentWorkflow
from archon.serve import AgentServer
from tests.serve.scripted import ASKS_WEATHER, WEATHER, Scripted, Start
from tests.test_readme import shown

USER: list[Any] = [{"role": "user", "content": "1+1="}]
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "weather", "description": "of a place", "input_schema": WEATHER["parameters"]}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "strict": None, **WEATHER}]
PLACE = {"place": "Rome", "days": 2}


def openai_client(url: str, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


def anthropic_client(url: str, key: str = "any") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)


@pytest.fixture
async def live(serve: Start) -> str:
    return (await serve())[1]


@pytest.fixture
async def calls_tools(serve: Start, tokenizer: Any) -> tuple[str, Scripted]:
    """A server whose model first asks for the weather and then says that it is fine."""
    scripted = Scripted(tokenizer, [ASKS_WEATHER, "It is fine."])
    _, url = await serve(over=scripted)
    return url, scripted


async def test_chat_streams_what_it_answers_whole(live: str) -> None:
    ask: dict[str, Any] = {"model": "m", "messages": USER, "seed": 3, "n": 3, "max_tokens": 30, "logprobs": True}
    async with openai_client(live) as client:
        whole = await client.chat.completions.create(**ask)
        texts, tokens, ends = [""] * 3, [list[Any]() for _ in range(3)], {}
        usage = None
        options: Any = {"include_usage": True}
        async for chunk in await client.chat.completions.create(**ask, stream=True, stream_options=options):
            assert chunk.object == "chat.completion.chunk"
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.logprobs is not None and choice.logprobs.content:
                    tokens[choice.index] += choice.logprobs.content
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
    assert len({choice.message.content for choice in whole.choices}) == 3
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert ends[choice.index] == choice.finish_reason
        assert choice.logprobs is not None and tokens[choice.index] == choice.logprobs.content
    assert usage == whole.usage


async def test_a_seed_repeats_an_answer_and_temperature_0_is_greedy(live: str) -> None:
    async with openai_client(live) as client:

        async def text(**sampling: Any) -> str | None:
            answer = await client.chat.completions.create(model="m", messages=USER, max_tokens=20, **sampling)
            return answer.choices[0].message.content

        assert await text(seed=1) == await text(seed=1) != await text(seed=2)
        assert await text(temperature=0) == await text(temperature=0)
        assert await text() != await text()


async def test_stop_strings_are_left_out_of_the_text_and_kept_in_the_tokens(
    serve: Start, engine: InProcessEngine, tokenizer: Any
) -> None:
    server, url = await serve()
    async with openai_client(url) as client:
        ask: dict[str, Any] = {"model": "m", "messages": USER, "seed": 4, "max_tokens": 30}
        ask["extra_body"] = {"ignore_eos": True}
        free = (await client.chat.completions.create(**ask)).choices[0].message.content
        assert free is not None and len(free) > 8
        stop = free[4:6]
        expected = free[: free.index(stop)]
        session = server.sessions.open(engine, GenerationHyperparameters())
        async with openai_client(url, session.key) as own:
            answer = await own.chat.completions.create(**ask, stop=stop)
            stream = await own.chat.completions.create(**ask, stop=["never", stop], stream=True)
            streamed = [chunk.choices[0] async for chunk in stream]
    assert answer.choices[0].message.content == expected
    assert "".join(choice.delta.content or "" for choice in streamed) == expected
    assert (answer.choices[0].finish_reason, streamed[-1].finish_reason) == ("stop", "stop")
    for interaction in session.interactions:
        text = tokenizer.decode(interaction.response.output_tokens, skip_special_tokens=True)
        assert text.startswith(expected + stop)


async def test_tools_over_two_turns(calls_tools: tuple[str, Scripted], tokenizer: Any) -> None:
    """The second prompt begins with the first and its answer, token for token, so that it is its continuation."""
    url, scripted = calls_tools
    async with openai_client(url) as client:
        first = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see."
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == PLACE
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        talk = [*USER, message, result]
        second = await client.chat.completions.create(model="m", messages=talk, tools=TOOLS)
    assert second.choices[0].message.content == "It is fine."
    assert second.choices[0].finish_reason == "stop" and second.choices[0].message.tool_calls is None
    before, after = (request.input_ids for request in scripted.requests)
    answer = [*tokenizer(ASKS_WEATHER).input_ids, tokenizer.eos_token_id]
    assert after[: len(before) + len(answer)] == before + answer
    assert "weather" in tokenizer.decode(before)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_an_answer_has_only_its_first(serve: Start, tokenizer: Any, stream: bool) -> None:
    _, url = await serve(over=Scripted(tokenizer, [ASKS_WEATHER + ASKS_WEATHER] * 3))
    async with openai_client(url) as client, anthropic_client(url) as claude:
        for parallel in (True, False):
            answer: Any = await client.chat.completions.create(
                model="m", messages=USER, tools=TOOLS, parallel_tool_calls=parallel, stream=stream
            )
            deltas = [chunk.choices[0].delta async for chunk in answer] if stream else [answer.choices[0].message]
            calls = [call for delta in deltas for call in delta.tool_calls or []]
            assert [call.function.name for call in calls] == ["weather"] * (2 if parallel else 1)
        message: Any = await claude.messages.create(
            model="m",
            messages=USER,
            max_tokens=500,
            tools=ANTHROPIC_TOOLS,
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
        assert [block.type for block in message.content].count("tool_use") == 1


async def test_a_stream_gives_tool_calls_whole_and_never_their_tags(calls_tools: tuple[str, Scripted]) -> None:
    async with openai_client(calls_tools[0]) as client:
        stream = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.function] == [(0, "weather")]
    assert calls[0].function is not None and json.loads(calls[0].function.arguments or "") == PLACE
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("tells_tokens", [True, False])
async def test_every_token_of_a_stream_is_told_once(serve: Start, tokenizer: Any, tells_tokens: bool) -> None:
    """Also over a generator that says nothing before its answer is whole."""
    _, url = await serve(over=Scripted(tokenizer, [ASKS_WEATHER], tells_tokens))
    ask: dict[str, Any] = {"model": "m", "messages": USER, "tools": TOOLS, "logprobs": True}
    async with openai_client(url) as client:
        stream = await client.chat.completions.create(**ask, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    told = [token.token for choice in choices if choice.logprobs for token in choice.logprobs.content or []]
    assert "".join(told) == ASKS_WEATHER + tokenizer.eos_token
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
    assert choices[-1].finish_reason == "tool_calls"


async def test_without_tools_a_call_is_text(calls_tools: tuple[str, Scripted]) -> None:
    async with openai_client(calls_tools[0]) as client:
        answer = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == ASKS_WEATHER
    assert answer.choices[0].finish_reason == "stop"


async def test_completions_of_text_and_of_tokens(live: str, tokenizer: Any) -> None:
    async with openai_client(live) as client:
        ask: dict[str, Any] = {"model": "m", "seed": 5, "max_tokens": 12, "logprobs": 0}
        text = await client.completions.create(**ask, prompt="1+1=")
        ids = await client.completions.create(**ask, prompt=tokenizer("1+1=").input_ids)
        several = await client.completions.create(**ask, prompt=["1+1=", "2+2="], n=2)
        streamed = [chunk async for chunk in await client.completions.create(**ask, prompt="1+1=", stream=True)]
    assert text.choices[0].text == ids.choices[0].text
    assert text.choices[0].logprobs == ids.choices[0].logprobs
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage is not None and several.usage.prompt_tokens == 8
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text
    logprobs = [chunk.choices[0].logprobs for chunk in streamed]
    together = [value for part in logprobs if part for value in part.token_logprobs or []]
    assert text.choices[0].logprobs is not None and together == text.choices[0].logprobs.token_logprobs
    offsets = [value for part in logprobs if part for value in part.text_offset or []]
    assert offsets == text.choices[0].logprobs.text_offset


async def test_vllms_token_ids(live: str, tokenizer: Any) -> None:
    async with openai_client(live) as client:
        extra = {"return_token_ids": True}
        ask: dict[str, Any] = {"model": "m", "prompt": "1+1=", "seed": 5, "extra_body": extra}
        whole = (await client.completions.create(**ask)).choices[0]
        chunks = [chunk.choices[0] async for chunk in await client.completions.create(**ask, stream=True)]
    tokens: Any = whole.model_extra
    assert tokens["prompt_token_ids"] == tokenizer("1+1=").input_ids
    assert tokenizer.decode(tokens["token_ids"], skip_special_tokens=True) == whole.text
    assert [i for chunk in chunks for i in (chunk.model_extra or {}).get("token_ids", [])] == tokens["token_ids"]


async def test_responses(live: str) -> None:
    async with openai_client(live) as client:
        answer = await client.responses.create(model="m", input="1+1=", instructions="add", max_output_tokens=9)
        assert answer.status == "incomplete" and answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage is not None and answer.usage.output_tokens == 9
        chat = await client.chat.completions.create(
            model="m",
            messages=[{"role": "system", "content": "add"}, *USER],
            max_tokens=9,
            temperature=0,
        )
        greedy = await client.responses.create(
            model="m", input="1+1=", instructions="add", max_output_tokens=9, temperature=0
        )
    assert greedy.output_text == chat.choices[0].message.content


async def test_responses_call_tools_over_two_turns(calls_tools: tuple[str, Scripted], tokenizer: Any) -> None:
    url, scripted = calls_tools
    async with openai_client(url) as client:
        first = await client.responses.create(model="m", input=USER, tools=RESPONSES_TOOLS)
        message, call = first.output
        assert first.status == "completed" and first.output_text == "Let me see."
        assert message.type == "message" and call.type == "function_call"
        assert call.name == "weather" and json.loads(call.arguments) == PLACE
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        talk: Any = [*USER, *(item.model_dump(exclude_none=True) for item in first.output), result]
        second = await client.responses.create(model="m", input=talk, tools=RESPONSES_TOOLS)
    assert second.output_text == "It is fine."
    before, after = (request.input_ids for request in scripted.requests)
    answer = [*tokenizer(ASKS_WEATHER).input_ids, tokenizer.eos_token_id]
    assert after[: len(before) + len(answer)] == before + answer


async def test_responses_stream(calls_tools: tuple[str, Scripted]) -> None:
    client = openai_client(calls_tools[0])
    async with client, client.responses.stream(model="m", input=USER, tools=RESPONSES_TOOLS) as stream:
        events: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events if event.type != "response.completed"] == list(
        range(len(events) - 1)
    )
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Let me see."
    assert final.output_text == "Let me see." and [item.type for item in final.output] == ["message", "function_call"]


async def test_anthropics_messages(live: str) -> None:
    greedy = {"temperature": 0}
    async with anthropic_client(live) as client, openai_client(live) as other:
        answer = await client.messages.create(model="m", messages=USER, system="add", max_tokens=9, extra_body=greedy)
        chat = await other.chat.completions.create(
            model="m", messages=[{"role": "system", "content": "add"}, *USER], max_tokens=9, temperature=0
        )
        (block,) = answer.content
        assert block.type == "text" and block.text == chat.choices[0].message.content
        assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 9
        stop = block.text[3:5]
        cut = await client.messages.create(
            model="m", messages=USER, system="add", max_tokens=9, extra_body=greedy, stop_sequences=[stop]
        )
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
        with pytest.raises(anthropic.BadRequestError, match="leaves no room for an answer"):
            await client.messages.create(model="m", messages=[{"role": "user", "content": "1" * 2000}], max_tokens=9)


async def test_anthropic_counts_what_it_will_read(live: str) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": USER, "system": "add", "tools": ANTHROPIC_TOOLS}
    async with anthropic_client(live) as client:
        counted = await client.messages.count_tokens(**asked)
        bare = await client.messages.count_tokens(model="m", messages=USER)
        answer = await client.messages.create(**asked, max_tokens=2)
    assert counted.input_tokens == answer.usage.input_tokens > bare.input_tokens > 0


async def test_anthropic_calls_tools_over_two_turns(calls_tools: tuple[str, Scripted], tokenizer: Any) -> None:
    url, scripted = calls_tools
    async with anthropic_client(url) as client:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 200, "tools": ANTHROPIC_TOOLS}
        first = await client.messages.create(**ask, messages=USER)
        text, call = first.content
        assert text.type == "text" and text.text == "Let me see."
        assert call.type == "tool_use" and (call.name, call.input) == ("weather", PLACE)
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        talk = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(**ask, messages=talk)
    (block,) = second.content
    assert block.type == "text" and block.text == "It is fine." and second.stop_reason == "end_turn"
    before, after = (request.input_ids for request in scripted.requests)
    answer = [*tokenizer(ASKS_WEATHER).input_ids, tokenizer.eos_token_id]
    assert after[: len(before) + len(answer)] == before + answer


async def test_anthropic_streams(calls_tools: tuple[str, Scripted]) -> None:
    client = anthropic_client(calls_tools[0])
    ask: dict[str, Any] = {"model": "m", "messages": USER, "tools": ANTHROPIC_TOOLS, "max_tokens": 200}
    async with client, client.messages.stream(**ask) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Let me see."
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].type == "tool_use" and final.content[1].input == PLACE
    assert final.stop_reason == "tool_use" and final.usage.output_tokens > 50


async def test_the_clients_raise_their_own_errors(serve: Start) -> None:
    server, url = await serve(token="secret")
    assert isinstance(server, AgentServer)
    async with openai_client(url, "wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="neither a session's nor the server's token"):
            await client.chat.completions.create(model="m", messages=USER)
    async with anthropic_client(url, "wrong") as other:
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(model="m", messages=USER, max_tokens=3)
    async with openai_client(url, "secret") as client:
        assert [model.id async for model in client.models.list()] == ["archon"]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1" * 2000}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt")


def test_the_agent_of_the_guide_is_trained_on(engine: InProcessEngine, tokenizer: Any) -> None:
    names: dict[str, Any] = {}
    exec(compile(shown("agent"), "guide", "exec"), names)
    gconfig = GenerationHyperparameters(n_samples=3, max_new_tokens=4)
    workflow = AgentWorkflow(names["Adds"](), gconfig, tokenizer)
    rollout = Rollout(engine, workflow)
    prompts = [Prompt(index, {"messages": USER, "answer": "2"}) for index in range(2)]

    batch = asyncio.run(rollout.collect(lambda n: prompts[:n], 2, 0))

    assert batch.trajectories["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.trajectories["rewards"].tolist() == [0.0] * 6
    assert batch.numbers["agent_answers"] == 1.0


async def test_an_answer_that_breaks_off_is_an_error_to_the_client(live: str, engine: InProcessEngine) -> None:
    endless: dict[str, Any] = {"model": "m", "messages": USER, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    async with openai_client(live) as client:
        stream = await client.chat.completions.create(**endless, stream=True)
        await anext(aiter(stream))
        engine.abort()
        with pytest.raises(openai.APIError, match="the engine aborted the answer"):
            async for _ in stream:
                pass
    async with anthropic_client(live) as other:
        asked: dict[str, Any] = {"model": "m", "messages": USER, "max_tokens": 900}
        messages = await other.messages.create(**asked, stream=True)
        await anext(aiter(messages))
        assert engine.abort() == 1
        with pytest.raises(anthropic.APIStatusError, match="the engine aborted the answer"):
            async for _ in messages:
                pass
