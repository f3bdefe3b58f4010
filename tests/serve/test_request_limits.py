"""A request with more than the server accepts is refused with the value and the limit, on every endpoint alike."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from archon.serve.preparation import SMALL_BYTES, THREADS, Preparation
from archon.serve.prompts import PromptReader
from archon.serve.service import Limits
from tests.serve.scripted import Start

USER = {"role": "user", "content": "hello"}
PROMPTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER]},
    "completions": {"prompt": "hello"},
    "responses": {"input": [USER]},
    "messages": {"messages": [USER], "max_tokens": 5},
    "messages/count_tokens": {"messages": [USER]},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": [USER] * 4097}, "messages has 4,097 items; expected at most 4,096"),
    "input": ({"input": [USER] * 4097}, "input has 4,097 items; expected at most 4,096"),
    "tools": ({"tools": [{}] * 513}, "tools has 513 items; expected at most 512"),
    "stop": ({"stop": ["x"] * 65}, "stop has 65 items; expected at most 64"),
    "stop_sequences": ({"stop_sequences": ["x"] * 65}, "stop_sequences has 65 items; expected at most 64"),
    "stop string": ({"stop": "x" * 1025}, "stop has a string of 1,025 characters; expected at most 1,024"),
    "stop strings": ({"stop_sequences": ["x" * 1025]}, "stop_sequences has a string of 1,025 characters"),
    "stop_token_ids": ({"stop_token_ids": [1] * 1025}, "stop_token_ids has 1,025 items; expected at most 1,024"),
    "logit_bias": ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias has 1,025 items"),
    "guided_choice": ({"guided_choice": ["x"] * 1025}, "guided_choice has 1,025 items; expected at most 1,024"),
    "prompt": ({"prompt": [1] * (2**18 + 1)}, "prompt has 262,145 items; expected at most 262,144"),
    "many values": ({"metadata": {"x": [[]] * 2**20}}, "the request has more than 524,288 values"),
    "values": ({"metadata": {"x": [[1]] * 2**18}}, "the request has more than 524,288 values"),
    "objects": ({"metadata": {"x": [{}] * 2**16}}, "the request has more than 65,536 objects"),
    "parts": (
        {"messages": [USER | {"content": [{}] * 8}] * 2048},
        "messages has 18,432 objects; expected at most 8,192",
    ),
    "nesting": ({"metadata": {"x": nested(99)}}, "the request is nested deeper than 100 levels"),
    "images": ({"metadata": {"x": [IMAGE] * 65}}, "the request has more than 64 images"),
}


@pytest.mark.parametrize("path", PROMPTS)
async def test_every_endpoint_refuses_more_than_the_limits(serve: Start, client: httpx.AsyncClient, path: str) -> None:
    _, url = await serve()
    for name, (fields, message) in REFUSED.items():
        answer = await client.post(f"{url}/{path}", json=PROMPTS[path] | fields)
        assert answer.status_code == 400, name
        error = answer.json()["error"]["message"]
        assert message in error and "\n" not in error


async def test_a_text_that_cannot_fit_the_context_is_not_tokenized(
    serve: Start, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = await serve()
    monkeypatch.setattr("archon.serve.prompts.tokenize", lambda *_: pytest.fail("it was tokenized"))
    monkeypatch.setattr("archon.serve.prompts.encode_prompt", lambda *_: pytest.fail("it was tokenized"))
    text = "x" * 100_000
    for path, fields in PROMPTS.items():
        content: Any = [{"role": "user", "content": text}]
        field = next(iter(fields))
        answer = await client.post(f"{url}/{path}", json=fields | {field: text if field == "prompt" else content})
        assert answer.status_code == 400
        assert "characters; the context of 1,024 tokens holds at most" in answer.json()["error"]["message"]


async def test_logprobs_of_answers_are_limited(serve: Start, client: httpx.AsyncClient) -> None:
    _, url = await serve()
    body = PROMPTS["chat/completions"] | {"n": 128, "max_tokens": 1000, "logprobs": True, "top_logprobs": 20}
    answer = await client.post(f"{url}/chat/completions", json=body)
    assert answer.status_code == 400
    assert "may have 2,688,000 logprobs; expected at most 524,288" in answer.json()["error"]["message"]


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(5000):
        if reached():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it never came")


async def test_tokens_of_all_texts_are_limited(
    serve: Start, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts after the limit are not tokenized."""
    monkeypatch.setattr("archon.serve.openai_completions.MAX_VALUES", 1000)
    _, url = await serve()
    answer = await client.post(f"{url}/completions", json={"prompt": ["x" * 600] * 20})
    assert answer.status_code == 400
    message = "the first 2 of 20 prompts have 1,200 tokens; expected at most 1,000 in one request"
    assert answer.json()["error"]["message"] == message


async def send(port: int, content: bytes, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {length}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def test_bodies_of_all_requests_are_limited_while_they_are_read(serve: Start, client: httpx.AsyncClient) -> None:
    server, url = await serve(limits=Limits(body_bytes=1000, total_body_bytes=1000))
    reader, writer = await send(server.port, b'{"prompt": "' + b"x" * 600, 620)
    await until(lambda: server._body_bytes > 0)
    refused = await client.post(f"{url}/completions", json={"prompt": "x" * 600})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    message = refused.json()["error"]["message"]
    assert message == "the requests in progress have 612 bytes, and the server holds at most 1,000; try again"
    writer.write(b'"}      ')
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    body: dict[str, Any] = {"prompt": "x" * 600, "stream": True}
    for _ in range(3):
        assert (await client.post(f"{url}/completions", json=body)).status_code == 200
    _, gone = await send(server.port, b'{"prompt": "' + b"x" * 600, 620)
    gone.close()
    await until(lambda: server._body_bytes == 0)


async def test_connections_are_limited(serve: Start) -> None:
    server, _ = await serve(limits=Limits(connections=2))
    opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
    answer = (await asyncio.wait_for(opened[-1][0].read(), 5)).decode()
    assert answer.startswith("HTTP/1.1 503 ") and "Retry-After: 1" in answer
    assert (
        "the server has 2 connections, the maximum; try again"
        in json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"]
    )
    for _, writer in opened:
        writer.close()


async def test_large_work_of_a_client_that_goes_is_dropped(
    serve: Start, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a thread; `/health` and small requests are answered meanwhile."""
    server, url = await serve()
    read: list[str] = []
    tokenize = PromptReader.tokenize
    monkeypatch.setattr(PromptReader, "tokenize", lambda *args: (read.append(args[2]), tokenize(*args))[1])
    body: dict[str, Any] = {"messages": [USER], "metadata": {"x": "y" * SMALL_BYTES}}
    end = threading.Event()
    interval = sys.getswitchinterval()
    others = [asyncio.create_task(server.preparation.run(end.wait, size=SMALL_BYTES + 1)) for _ in range(THREADS)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{url}/chat/completions", json=body, timeout=0.3)
        assert (await client.get(f"{url.removesuffix('/v1')}/health")).status_code == 200
        assert (await client.post(f"{url}/chat/completions", json={"messages": [USER]})).status_code == 200
        assert sys.getswitchinterval() < interval
        read.clear()
    finally:
        end.set()
    await asyncio.gather(*others)
    await asyncio.sleep(0.05)
    assert read == []
    assert (await client.post(f"{url}/chat/completions", json=body)).status_code == 200
    assert read == ["messages"] and sys.getswitchinterval() == interval


async def test_a_client_that_goes_while_its_body_is_read_leaves_nothing(serve: Start) -> None:
    server, _ = await serve()
    for _ in range(20):
        _, writer = await send(server.port, b'{"prompt"', 100)
        writer.close()
    await until(lambda: (server.active_requests, server._body_bytes) == (0, 0))


async def test_small_work_stays_on_the_event_loop() -> None:
    preparation = Preparation()
    assert await preparation.run(threading.get_ident, size=SMALL_BYTES) == threading.get_ident()
    assert await preparation.run(threading.get_ident, size=SMALL_BYTES + 1) != threading.get_ident()
    preparation.close()
