"""The server as any client meets it: who may ask, what is refused and how, sessions over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import random
import sys
from typing import Any

import httpx
import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.models.base import BaseArchonModel
from archon.schema.errors import ConfigError
from archon.serve import AgentServer, Limits
from tests.serve.scripted import WEATHER, Scripted, Start

USER = [{"role": "user", "content": "1+1="}]
CHAT = {"messages": USER, "max_tokens": 3, "seed": 1}
GOOD: dict[str, dict[str, Any]] = {
    "/chat/completions": {**CHAT, "tools": [{"type": "function", "function": WEATHER}], "stop": ["x"], "n": 1},
    "/completions": {"prompt": "1+1=", "max_tokens": 3, "logprobs": 0, "temperature": 0.5},
    "/responses": {"input": USER, "max_output_tokens": 3, "instructions": "add", "top_p": 0.9},
    "/messages": {"messages": USER, "max_tokens": 3, "system": "add", "stop_sequences": ["x"]},
}


def check_error(response: httpx.Response, status: int) -> str:
    """The error's one line, after a check that it is JSON in the path's format."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    if response.url.path == "/v1/messages":
        assert response.json()["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
    message: str = error["message"]
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("path", GOOD)
async def test_every_endpoint_answers(serve: Start, client: httpx.AsyncClient, path: str) -> None:
    _, url = await serve()
    response = await client.post(url + path, json=GOOD[path])
    assert response.status_code == 200, response.text


# What the newest SDKs may send besides, and what changes nothing of an answer.
HINTS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "user": "me",
        "safety_identifier": "me",
        "store": True,
        "metadata": {"run": "1"},
        "service_tier": "flex",
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "verbosity": None,
        "modalities": ["text"],
        "prediction": {"type": "content", "content": "2"},
        "reasoning_effort": "none",
        "logit_bias": {},
        "chat_template_kwargs": {},
    },
    "/responses": {
        "include": [],
        "background": False,
        "max_tool_calls": 3,
        "top_logprobs": 0,
        "conversation": None,
        "parallel_tool_calls": False,
        "store": False,
        "metadata": {},
        "user": "me",
        "prompt_cache_key": "k",
        "reasoning": {"effort": "none"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "disabled",
        "service_tier": "auto",
    },
    "/messages": {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
}


# What clients of vLLM and SGLang send besides, on every path.
NEUTRAL: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "best_of": 1,
    "use_beam_search": False,
    "early_stopping": False,
    "length_penalty": 1.0,
    "priority": 0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "request_id": "r",
    "cache_salt": "s",
    "extra_body": {},
    "bad_words": [],
    "guided_json": None,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
}
NEUTRAL_OF_PATH: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "echo": False,
        "functions": [],
        "return_tokens_as_token_ids": False,
        "documents": None,
        "audio": None,
        "top_logprobs": 0,
        "logit_bias": {},
        "max_tokens": 3,
    },
    "/completions": {"suffix": "", "prompt_embeds": None, "echo": False, "add_special_tokens": True, "logit_bias": {}},
    "/responses": {},
    "/messages": {
        "context_management": {"edits": []},
        "output_config": {"effort": "medium"},
        "mcp_servers": [],
        "container": None,
        "betas": ["b"],
    },
}
for neutral_path, neutral in NEUTRAL_OF_PATH.items():
    HINTS[neutral_path] = HINTS.get(neutral_path, {}) | NEUTRAL | neutral


@pytest.mark.parametrize("path", HINTS)
async def test_what_cannot_change_an_answer_is_accepted(
    serve: Start, client: httpx.AsyncClient, tokenizer: Any, path: str
) -> None:
    answers = []
    for hints in ({}, HINTS[path]):
        scripted = Scripted(tokenizer, ["2"])
        _, url = await serve(over=scripted)
        response = await client.post(url + path, json=GOOD[path] | hints)
        assert response.status_code == 200, response.text
        (request,) = scripted.requests
        answers.append((request.input_ids, request.gconfig))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("path", GOOD)
async def test_sampling_fields_reach_the_generator(
    serve: Start, client: httpx.AsyncClient, tokenizer: Any, path: str
) -> None:
    scripted = Scripted(tokenizer, ["2"])
    _, url = await serve(over=scripted)
    fields = {"min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "top_k": 3}
    bias = {} if path in ("/responses", "/messages") else {"logit_bias": {"7": -1.5}}
    response = await client.post(url + path, json=GOOD[path] | fields | bias)
    assert response.status_code == 200, response.text
    (request,) = scripted.requests
    assert {name: getattr(request.gconfig, name) for name in fields} == fields
    assert request.gconfig.logit_bias == ({7: -1.5} if bias else {})


@pytest.mark.parametrize(("asked", "limit"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 30}, 30)])
async def test_completions_have_16_tokens_by_default(
    serve: Start, client: httpx.AsyncClient, tokenizer: Any, asked: dict[str, Any], limit: int
) -> None:
    scripted = Scripted(tokenizer, ["2"])
    _, url = await serve(over=scripted)
    assert (await client.post(f"{url}/completions", json={"prompt": "1", **asked})).status_code == 200
    assert scripted.requests[0].gconfig.max_new_tokens == limit


async def test_the_last_message_is_continued_or_no_answer_is_begun(
    serve: Start, client: httpx.AsyncClient, tokenizer: Any
) -> None:
    scripted = Scripted(tokenizer, [" 2", "2"])
    _, url = await serve(over=scripted)
    talk = [*USER, {"role": "assistant", "content": "The answer is"}]
    continued = CHAT | {"messages": talk, "continue_final_message": True, "add_generation_prompt": False}
    for body in (continued, CHAT | {"add_generation_prompt": False}):
        assert (await client.post(f"{url}/chat/completions", json=body)).status_code == 200
    prompts = [tokenizer.decode(request.input_ids) for request in scripted.requests]
    assert prompts[0].endswith("assistant\nThe answer is") and prompts[1].endswith("1+1=<|im_end|>\n")


MESSAGES: dict[str, tuple[str, list[Any], list[str]]] = {
    "reasoning and provider fields": (
        "/chat/completions",
        [{"role": "assistant", "content": "x", "reasoning": "y", "provider_specific_fields": {"a": 1}}],
        ["assistant\nx"],
    ),
    "refusal": ("/chat/completions", [{"role": "assistant", "content": None, "refusal": "I refuse"}], ["I refuse"]),
    "arguments as an object": (
        "/chat/completions",
        [
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_call_id": "1", "content": "9"},
        ],
        ['{"a": 1}'],
    ),
    "document and redacted thinking": (
        "/messages",
        [
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "title": "Title",
                        "source": {"type": "text", "media_type": "text/plain", "data": "hello"},
                    },
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        ["assistant\ny<|im_end|>", "Title\nhello\nso?"],
    ),
    "a tool without result": (
        "/messages",
        [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": None}]},
        ],
        ["<tool_response>\n\n</tool_response>"],
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
async def test_messages_of_other_providers_are_read(
    serve: Start, client: httpx.AsyncClient, tokenizer: Any, name: str
) -> None:
    path, further, expected = MESSAGES[name]
    scripted = Scripted(tokenizer, ["2"])
    _, url = await serve(over=scripted)
    body = {"messages": [*USER, *further, *([] if further[-1]["role"] == "user" else USER)], "max_tokens": 3}
    response = await client.post(url + path, json=body)
    assert response.status_code == 200, response.text
    prompt = tokenizer.decode(scripted.requests[0].input_ids)
    assert all(text in prompt for text in expected), prompt


async def test_top_logprobs_are_those_of_the_whole_vocabulary(
    serve: Start, client: httpx.AsyncClient, model: BaseArchonModel, tokenizer: Any
) -> None:
    """In a response and in a stream, without penalties and cuts, beside a request that does not ask for them."""
    _, url = await serve()
    body = CHAT | {"logprobs": True, "top_logprobs": 4, "temperature": 0.7, "presence_penalty": 1, "top_k": 2}
    body |= {"return_token_ids": True}
    whole, plain = await asyncio.gather(
        client.post(f"{url}/chat/completions", json=body),
        client.post(f"{url}/chat/completions", json=body | {"top_logprobs": 0}),
    )
    answer, choice = whole.json(), whole.json()["choices"][0]
    tokens = answer["prompt_token_ids"] + choice["token_ids"]
    n = len(tokens)
    with torch.no_grad():
        logits: Any = model(torch.tensor(tokens), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
    best = (logits / 0.7).log_softmax(-1)[len(answer["prompt_token_ids"]) - 1 : -1].topk(4)
    for place, item in enumerate(choice["logprobs"]["content"]):
        top = item["top_logprobs"]
        assert [entry["token"] for entry in top] == [
            tokenizer.decode([token]) for token in best.indices[place].tolist()
        ]
        assert [entry["logprob"] for entry in top] == pytest.approx(best.values[place].tolist(), abs=1e-4)
    assert [item["top_logprobs"] for item in plain.json()["choices"][0]["logprobs"]["content"]] == [[]] * 3
    streamed: list[Any] = []
    async with client.stream("POST", f"{url}/chat/completions", json=body | {"stream": True}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                (delta,) = json.loads(line.removeprefix("data: "))["choices"]
                streamed += (delta.get("logprobs") or {}).get("content", [])
    assert streamed == choice["logprobs"]["content"]
    named = await client.post(f"{url}/chat/completions", json=body | {"return_tokens_as_token_ids": True})
    names = [item["token"] for item in named.json()["choices"][0]["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    ask = {"prompt": "1+1=", "max_tokens": 3, "logprobs": 2, "seed": 1}
    scores = (await client.post(f"{url}/completions", json=ask)).json()["choices"][0]["logprobs"]
    for token, logprob, tops in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert tops[token] == logprob and len(tops) in (2, 3)


async def test_a_line_is_logged_for_each_request(
    serve: Start, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    _, url = await serve(log_requests=True)
    with caplog.at_level(logging.INFO, "archon.serve.request_log"):
        answer = (await client.post(f"{url}/chat/completions", json=CHAT)).json()
        await client.post(f"{url}/completions", json=GOOD["/completions"] | {"stream": True})
        await client.post(f"{url}/completions", json={"prompt": []})
        await client.get(f"{url}/models")
    lines = [record.getMessage() for record in caplog.records if record.name == "archon.serve.request_log"]
    usage = answer["usage"]
    counts = f"prompt_tokens={usage['prompt_tokens']} completion_tokens={usage['completion_tokens']} "
    assert lines[0].startswith(f"POST /v1/chat/completions 200 {counts}") and lines[0].endswith(" ms")
    assert lines[1].startswith("POST /v1/completions 200 prompt_tokens=4 completion_tokens=")
    assert lines[2].startswith("POST /v1/completions 400 prompt_tokens=- completion_tokens=- ")
    assert lines[3].startswith("GET /v1/models 200 ") and len(lines) == 4


async def test_an_answer_is_the_generators_own(
    serve: Start, client: httpx.AsyncClient, engine: InProcessEngine, tokenizer: Any
) -> None:
    _, url = await serve()
    body = CHAT | {"return_token_ids": True, "logprobs": True, "max_tokens": 20}
    answer = (await client.post(f"{url}/chat/completions", json=body)).json()
    choice = answer["choices"][0]
    text = tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text).input_ids
    (direct,) = engine.generate([ModelRequest(prompt, GenerationHyperparameters(max_new_tokens=20, seed=1))])
    assert answer["prompt_token_ids"] == prompt
    assert choice["token_ids"] == direct.output_tokens
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == direct.output_logprobs
    assert choice["message"]["content"] == tokenizer.decode(direct.output_tokens, skip_special_tokens=True)
    assert choice["finish_reason"] == direct.stop_reason
    assert answer["usage"]["completion_tokens"] == len(direct.output_tokens)


async def test_a_session_over_http(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve()
    session = (await client.post(f"{url}/sessions")).json()
    own = {"Authorization": f"Bearer {session['api_key']}"}
    here = f"{url}/sessions/{session['id']}"
    ask = {**CHAT, "return_token_ids": True}
    first = (await client.post(f"{url}/chat/completions", json=ask, headers=own)).json()
    await client.post(f"{url}/chat/completions", json=ask)  # with another key: not in the session
    assert "none of the session's 1 answers" in check_error(await client.get(f"{here}/export", headers=own), 400)
    reward = {"reward": 0.5, "completion_id": first["id"]}
    assert (await client.post(f"{here}/reward", json=reward, headers=own)).status_code == 200
    for style in ("individual", "concat"):
        exported = (await client.get(f"{here}/export", params={"style": style}, headers=own)).json()
        (row,) = exported["trajectories"]
        assert row["input_ids"] == first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert sum(row["loss_mask"]) == len(first["choices"][0]["token_ids"])
        assert row["reward"] == 0.5 and row["answers"] == [{"completion_id": first["id"], "choice": 0}]
    assert "turn_discount" in check_error(await client.get(f"{here}/export?turn_discount=2"), 400)
    check_error(await client.post(f"{here}/reward", json={"reward": 1, "completion_id": "x"}, headers=own), 400)
    check_error(await client.post(f"{here}/reward", json={"reward": None}, headers=own), 400)
    other = (await client.post(f"{url}/sessions")).json()
    theirs = {"Authorization": f"Bearer {other['api_key']}"}
    check_error(await client.get(f"{here}/export", headers=theirs), 404)
    check_error(await client.post(f"{url}/sessions", headers=theirs), 403)
    assert (await client.delete(here, headers=own)).json()["answers"] == 1
    check_error(await client.get(f"{here}/export"), 404)


async def test_a_session_that_nobody_uses_is_closed(serve: Start, client: httpx.AsyncClient) -> None:
    server, url = await serve(limits=Limits(sessions=2, session_idle_seconds=0.5))
    idle = [(await client.post(f"{url}/sessions")).json() for _ in range(2)]
    own = {"Authorization": f"Bearer {idle[1]['api_key']}"}
    check_error(await client.post(f"{url}/sessions"), 429)
    for _ in range(4):
        await asyncio.sleep(0.2)
        assert (await client.post(f"{url}/chat/completions", json=CHAT, headers=own)).status_code == 200
    check_error(await client.delete(f"{url}/sessions/{idle[0]['id']}"), 404)
    assert (await client.post(f"{url}/sessions")).status_code == 201
    assert len(server.sessions) == 2


@pytest.mark.parametrize("path", GOOD)
async def test_a_token_is_asked_of_everyone(serve: Start, client: httpx.AsyncClient, path: str) -> None:
    _, url = await serve(token="secret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secre"}, {"Authorization": "Basic secret"}):
        check_error(await client.post(url + path, json=GOOD[path], headers=headers), 401)
    for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        assert (await client.post(url + path, json=GOOD[path], headers=headers)).status_code == 200
    check_error(await client.get(f"{url}/models"), 401)
    check_error(await client.post(f"{url}/sessions"), 401)
    assert (await client.get(url.removesuffix("/v1") + "/health")).json() == {"status": "ok"}


async def test_without_a_token_only_this_machine_is_served(
    serve: Start, client: httpx.AsyncClient, tokenizer: Any
) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match="needs a token"):
            await AgentServer(tokenizer).start(host)
    _, url = await serve()
    # As a page would ask whose own name resolves to loopback, or that posts a form.
    for host in ("evil.example", "evil_example:80", "evil:80:90", "[", "", "localhost.evil.example", "127.0.0.1@evil"):
        check_error(await client.post(f"{url}/chat/completions", json=CHAT, headers={"Host": host}), 403)
    for host in ("localhost", "LOCALHOST:80", "127.0.0.9:1", "[::1]:80"):
        assert (await client.get(f"{url}/models", headers={"Host": host})).status_code == 200
    check_error(await client.post(f"{url}/chat/completions", content=json.dumps(CHAT)), 415)
    for origin in ("https://evil.example", "null", "http://["):
        check_error(await client.post(f"{url}/sessions", headers={"Origin": origin}), 403)
    assert (await client.post(f"{url}/sessions", headers={"Origin": "http://localhost:3000"})).status_code == 201


async def test_a_port_in_use_is_named(serve: Start, tokenizer: Any) -> None:
    server, _ = await serve()
    with pytest.raises(ConfigError, match=f"port {server.port} on 127.0.0.1 is in use"):
        await AgentServer(tokenizer).start(port=server.port)


@pytest.mark.parametrize("path", GOOD)
async def test_a_context_overflow_is_400(serve: Start, client: httpx.AsyncClient, path: str) -> None:
    _, url = await serve()
    long = "1" * 2000
    body = GOOD[path] | ({"prompt": long} if "prompt" in GOOD[path] else {"messages": [USER[0] | {"content": long}]})
    if path == "/responses":
        body = {"input": long}
    for stream in (False, True):
        response = await client.post(url + path, json=body | {"stream": stream})
        assert "leaves no room for an answer within 1024 tokens" in check_error(response, 400)
        if path != "/messages":
            assert response.json()["error"]["code"] == "context_length_exceeded"


BAD_BODIES: list[tuple[str, Any, str]] = [
    ("/chat/completions", {}, "messages: field required"),
    ("/chat/completions", {"messages": []}, "at least 1 item"),
    ("/chat/completions", CHAT | {"temperatur": 1}, "unknown key 'temperatur', did you mean 'temperature'"),
    ("/chat/completions", CHAT | {"temperature": -1}, "temperature: got -1"),
    ("/chat/completions", CHAT | {"top_p": 0}, "top_p: got 0"),
    ("/chat/completions", CHAT | {"n": 0}, "n: got 0"),
    ("/chat/completions", CHAT | {"n": 10**9}, "n: got 1000000000"),
    ("/chat/completions", CHAT | {"seed": -2}, "seed: got -2"),
    ("/chat/completions", CHAT | {"stop": [""]}, "stop: got an empty string"),
    ("/chat/completions", CHAT | {"logit_bias": {"1": 500}}, "logit_bias.1: got 500"),
    ("/chat/completions", CHAT | {"logit_bias": {"a": 5}}, "logit_bias.a"),
    ("/chat/completions", CHAT | {"logit_bias": {"100000": 5}}, "logit_bias has token id 100000"),
    ("/chat/completions", CHAT | {"presence_penalty": 2.5}, "presence_penalty: got 2.5"),
    ("/chat/completions", CHAT | {"repetition_penalty": 0}, "repetition_penalty: got 0"),
    ("/chat/completions", CHAT | {"top_logprobs": 3}, "top_logprobs: got 3, which needs logprobs"),
    ("/responses", {"input": "1", "text": {"format": {"type": "json_schema"}}}, "json_schema has no schema"),
    ("/completions", {"prompt": "1", "response_format": {"type": "json_object"}}, "unknown key 'response_format'"),
    ("/chat/completions", CHAT | {"best_of": 2}, "best_of: got 2"),
    ("/chat/completions", CHAT | {"use_beam_search": True}, "use_beam_search: got True"),
    ("/chat/completions", CHAT | {"length_penalty": 2}, "length_penalty: got 2"),
    ("/chat/completions", CHAT | {"guided_grammar": "x"}, "guided_grammar: this server does not support"),
    ("/chat/completions", CHAT | {"skip_special_tokens": False}, "skip_special_tokens: got False"),
    ("/chat/completions", CHAT | {"web_search_options": {}}, "web_search_options: this server does not support"),
    ("/chat/completions", CHAT | {"continue_final_message": True}, "the last message must be the assistant's"),
    ("/completions", {"prompt": "1", "suffix": "2"}, "suffix: got '2'"),
    ("/messages", {"messages": USER, "max_tokens": 1, "context_management": {"edits": [{}]}}, "edits: got"),
    ("/messages", {"messages": USER, "max_tokens": 1, "mcp_servers": [{}]}, "mcp_servers: got"),
    ("/chat/completions", CHAT | {"tool_choice": "always"}, "tool_choice"),
    ("/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages.0.input.content"),
    ("/chat/completions", {"messages": [{"role": "robot", "content": "1"}]}, "messages.0.input.role: got 'robot'"),
    ("/chat/completions", {"messages": [{"role": "user", "content": "\u2603"}]}, "the tokenizer refuses"),
    ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ("/completions", {"prompt": []}, "the prompt is empty"),
    ("/completions", {"prompt": [5, 10**6]}, "token id 1000000 is not below the vocabulary size"),
    ("/completions", {"prompt": [-1]}, "token id -1"),
    ("/completions", {"prompt": ["1"] * 100, "n": 100}, "are 10000 answers"),
    ("/completions", {"prompt": "1", "echo": True, "stream": True}, "echo is not streamed"),
    ("/completions", {"prompt": "1", "max_tokens": 0}, "max_tokens: got 0"),
    ("/chat/completions", CHAT | {"verbosity": "low"}, "verbosity: got 'low'"),
    ("/chat/completions", CHAT | {"reasoning_effort": "high"}, "cannot switch thinking"),
    ("/chat/completions", CHAT | {"chat_template_kwargs": {"enable_thinking": False}}, "no variable 'enable_thinking'"),
    ("/chat/completions", CHAT | {"chat_template_kwargs": {"messages": []}}, "no variable 'messages'"),
    ("/responses", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "encrypted_content"),
    ("/responses", {"input": "1", "include": ["message.output_text.logprobs"]}, "include.0"),
    ("/responses", {"input": "1", "background": True}, "background"),
    ("/responses", {"input": "1", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("/responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "x"}]}, "not JSON"),
    ("/messages", {"messages": USER}, "max_tokens: field required"),
    (
        "/messages",
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            ],
            "max_tokens": 1,
        },
        "expected only text blocks in it",
    ),
    ("/messages", {"messages": USER, "max_tokens": 1, "tool_choice": {"type": "any"}}, "the tools of the request"),
    ("/messages", {"messages": USER, "max_tokens": 1, "tool_choice": {"type": "tool"}}, "set name for type 'tool'"),
]


async def test_a_body_that_cannot_be_honoured_is_400_and_says_why(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve()
    for path, body, told in BAD_BODIES:
        for stream in ({}, {"stream": True}):
            message = check_error(await client.post(url + path, json=body | stream), 400)
            assert told in message, (body, message)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "a JSON list"),
        (b'{"messages": NaN}', "NaN is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "content"),
    ],
)
async def test_a_body_that_is_no_json_object_is_400(
    serve: Start, client: httpx.AsyncClient, content: bytes, told: str
) -> None:
    _, url = await serve()
    for path in GOOD:
        response = await client.post(url + path, content=content, headers={"Content-Type": "application/json"})
        assert told in check_error(response, 400) or b"ud800" in content


async def test_unknown_paths_and_methods(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve()
    check_error(await client.get(f"{url}/nothing"), 404)
    check_error(await client.get(f"{url}/models/gpt"), 404)
    response = await client.get(f"{url}/chat/completions")
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    assert (await client.get(f"{url}/models")).json()["data"][0]["id"] == "archon"
    described = (await client.get(url.removesuffix("/v1") + "/openapi.json")).json()
    assert described["openapi"] == "3.1.0" and {f"/v1{path}" for path in GOOD} <= described["paths"].keys()


async def test_what_is_too_large_is_refused(serve: Start, client: httpx.AsyncClient) -> None:
    limits = Limits(body_bytes=1000, header_bytes=2000, headers=20)
    _, url = await serve(limits=limits)
    body = CHAT | {"user": "x" * 2000}
    for path in GOOD:
        check_error(await client.post(url + path, json=body), 413)
    check_error(await client.get(f"{url}/models", headers={"x-long": "x" * 4000}), 400)
    check_error(await client.get(f"{url}/models", headers={f"x-{i}": "x" for i in range(40)}), 400)
    assert (await client.post(f"{url}/chat/completions", json=CHAT)).status_code == 200


async def test_what_is_no_http_is_told_in_json(serve: Start) -> None:
    server, _ = await serve()
    for sent in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        received = await asyncio.wait_for(reader.read(), 5)
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), received
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        writer.close()


async def test_more_at_a_time_than_allowed_is_429(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve(limits=Limits(requests=2, sessions=1, calls_per_session=1))
    asked = [client.post(f"{url}/chat/completions", json=CHAT | {"max_tokens": 200}) for _ in range(6)]
    answers = await asyncio.gather(*asked)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
    assert (await client.post(f"{url}/chat/completions", json=CHAT)).status_code == 200
    session = (await client.post(f"{url}/sessions")).json()
    check_error(await client.post(f"{url}/sessions"), 429)
    own = {"Authorization": f"Bearer {session['api_key']}"}
    assert (await client.post(f"{url}/chat/completions", json=CHAT, headers=own)).status_code == 200
    full = await client.post(f"{url}/completions", json=GOOD["/completions"], headers=own)
    assert "has 1 of its 1 answers" in check_error(full, 429)


async def test_an_aborted_answer_is_an_error_never_a_short_answer(
    serve: Start, client: httpx.AsyncClient, engine: InProcessEngine
) -> None:
    server, url = await serve()
    session = server.sessions.open(engine, GenerationHyperparameters(max_new_tokens=900))
    own = {"Authorization": f"Bearer {session.key}"}
    asked = asyncio.create_task(client.post(f"{url}/chat/completions", json={"messages": USER}, headers=own))
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if engine.abort():
            break
    assert "aborted" in check_error(await asked, 503)
    assert session.interactions == []


async def test_an_answer_that_spans_an_update_of_the_weights_keeps_the_version_of_each_token(
    serve: Start, client: httpx.AsyncClient, engine: InProcessEngine, model: BaseArchonModel
) -> None:
    server, url = await serve()
    session = server.sessions.open(engine, GenerationHyperparameters(max_new_tokens=60, ignore_eos=True))
    own = {"Authorization": f"Bearer {session.key}"}
    async with client.stream(
        "POST", f"{url}/chat/completions", json={"messages": USER, "stream": True}, headers=own
    ) as response:
        lines = response.aiter_lines()
        for _ in range(8):
            await anext(lines)
        engine.update_weights(model, version=7)
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    session.set_reward(1.0)
    (row,) = session.export()
    versions = row.record.versions[-60:]
    assert set(versions) == {0, 7} and versions == sorted(versions)


async def test_a_failure_of_ours_is_500_and_keeps_its_secret(
    serve: Start, client: httpx.AsyncClient, tokenizer: Any
) -> None:
    _, url = await serve(over=Scripted(tokenizer, []))  # its script is empty: StopIteration
    for path in GOOD:
        message = check_error(await client.post(url + path, json=GOOD[path]), 500)
        assert message == "internal server error; see the server log"


JUNK: list[Any] = [None, True, -1, 0, 3.5, 10**30, 1e308, "", "x", "\x00", [], [None], [[]], {}, {"type": "text"}, "é"]


@pytest.mark.slow
async def test_no_malformed_body_is_answered_with_5xx(serve: Start, client: httpx.AsyncClient) -> None:
    """Good bodies with any one value replaced by junk, at any depth."""
    _, url = await serve()
    chance = random.Random(0)
    conversation = [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": "1"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    bodies = GOOD | {"/chat/completions": GOOD["/chat/completions"] | {"messages": conversation}}
    statuses = set()
    for _ in range(300):
        path = chance.choice(list(bodies))
        body = json.loads(json.dumps(bodies[path] | {"stream": chance.random() < 0.3}))
        place: Any = body
        while True:
            key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not place[key] or not isinstance(place[key], dict | list) or chance.random() < 0.3:
                break
            place = place[key]
        place[key] = chance.choice(JUNK)
        response = await client.post(url + path, json=body)
        statuses.add(response.status_code)
        if response.status_code != 200:
            check_error(response, 400)
    assert statuses == {200, 400}


@pytest.mark.parametrize("stream", [False, True])
async def test_memory_that_runs_out_is_told_in_one_line_and_costs_the_requests_of_the_moment(
    serve: Start,
    client: httpx.AsyncClient,
    engine: InProcessEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    _, url = await serve()
    with monkeypatch.context() as patched:
        patched.setattr(engine._generator, "step", lambda: torch.empty(2**58))  # PyTorch refuses it by itself
        response = await client.post(f"{url}/chat/completions", json=CHAT | {"stream": stream})
    told = "the server ran out of memory, open files or threads; see its log"
    if stream:
        assert told in response.text
    else:
        assert check_error(response, 503) == told
    [line] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "chat/completions failed: out of memory (" in line.getMessage() and line.exc_info is None
    assert (await client.post(f"{url}/chat/completions", json=CHAT)).status_code == 200


def test_without_the_framework_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "archon.serve.service")
    with pytest.raises(ConfigError, match=r"fastapi, which is not installed; install archon's extra `rl`"):
        importlib.import_module("archon.serve.service")
