"""Clients that go, that send nothing, or that never come to an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from archon.generation import InProcessEngine
from archon.serve import Limits
from tests.serve.scripted import Start
from tests.serve.test_server import CHAT
from tests.tolerances import SOON_SECONDS


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_takes_its_request_with_it(
    serve: Start, client: httpx.AsyncClient, engine: InProcessEngine, stream: bool
) -> None:
    _, url = await serve()
    body = CHAT | {"max_tokens": 900, "ignore_eos": True, "n": 2, "stream": stream}
    if stream:
        async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
            await anext(response.aiter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{url}/chat/completions", json=body, timeout=0.2)
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not engine._generator.unfinished:
            break
    assert engine.abort() == 0
    assert 0 < engine.stats.decode_tokens < 1700
    assert (await client.post(f"{url}/chat/completions", json=CHAT)).status_code == 200


async def test_a_client_that_goes_while_its_stream_ends_is_no_error_of_the_server(
    serve: Start, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the server was writing at that moment."""
    _, url = await serve()
    caplog.set_level(logging.WARNING)

    async def goes(tokens: int) -> None:
        body: dict[str, Any] = CHAT | {"max_tokens": tokens, "ignore_eos": True, "stream": True}
        async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
            await anext(response.aiter_lines())

    for _ in range(8):
        await asyncio.gather(*(goes(tokens) for tokens in range(1, 17)))
    assert (await client.post(f"{url}/chat/completions", json=CHAT)).status_code == 200
    assert [record.getMessage() for record in caplog.records] == []


async def test_connections_that_send_nothing_hold_nothing_up(serve: Start, client: httpx.AsyncClient) -> None:
    server, url = await serve()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    assert (await client.post(f"{url}/chat/completions", json=CHAT)).status_code == 200
    for connection in idle:
        connection.close()


async def test_a_request_that_never_ends_is_ended(serve: Start, client: httpx.AsyncClient) -> None:
    server, url = await serve(limits=Limits(request_seconds=0.3))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    for begun in (b"", head):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(20):  # a header line at a time does not help
            writer.write(begun and (begun if _ == 0 else b"x-more: 1\r\n"))
            if reader.at_eof():
                break
            await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):  # a line sent after the end is answered by a reset
            assert await asyncio.wait_for(reader.read(), 1) == b""
        writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    answer = (await reader.readuntil(b"}}")).decode()
    assert answer.startswith("HTTP/1.1 408 ") and "the body did not arrive within 0.3 s" in answer
    writer.close()
    for tokens in (250, 1):  # the time that an answer takes, and that between two requests, is another matter
        asked = CHAT | {"max_tokens": tokens, "ignore_eos": True}
        assert (await client.post(f"{url}/chat/completions", json=asked)).status_code == 200
        await asyncio.sleep(0.4 * (tokens > 1))


async def test_headers_without_end_are_refused_before_they_fill_the_memory(serve: Start) -> None:
    server, _ = await serve(limits=Limits(header_bytes=1000, headers=10))
    for endless in (b"x" * 500, b"x-more: 1\r\n" * 50):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-first: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(0)
        received = b""
        with contextlib.suppress(ConnectionError):  # what is sent after the end is answered by a reset
            while data := await asyncio.wait_for(reader.read(1 << 16), 5):
                received += data
        writer.close()
        if received:
            head, _, body = received.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and "headers" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_the_server_ends_what_is_being_answered_at_once_and_leaves_no_thread(
    serve: Start, client: httpx.AsyncClient, engine: InProcessEngine, stream: bool
) -> None:
    threads = set(threading.enumerate())  # one of an earlier test may end meanwhile
    for _ in range(3):
        server, url = await serve()
        body = CHAT | {"max_tokens": 900, "ignore_eos": True, "stream": stream}
        asked = [asyncio.create_task(client.post(f"{url}/chat/completions", json=body)) for _ in range(4)]
        for _ in range(1000):
            await asyncio.sleep(0.001)
            if len(engine._generator.unfinished) == len(asked):
                break
        begun = time.perf_counter()
        await server.close()
        assert time.perf_counter() - begun < SOON_SECONDS
        assert engine.abort() == 0
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(outcome, httpx.TransportError)
    assert set(threading.enumerate()) <= threads


async def test_clients_that_go_while_every_turn_of_the_loop_brings_a_token_are_noticed_at_once(
    serve: Start, client: httpx.AsyncClient, engine: InProcessEngine
) -> None:
    _, url = await serve()
    body: dict[str, Any] = CHAT | {"max_tokens": 900, "ignore_eos": True, "stream": True, "return_token_ids": True}

    async def goes() -> None:
        async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
            await anext(response.aiter_lines())

    await asyncio.gather(*(goes() for _ in range(8)))
    for _ in range(1000):
        await asyncio.sleep(0)
        if not engine._generator.unfinished:
            break
    assert engine.abort() == 0
    assert engine.stats.decode_tokens < 8 * 100
