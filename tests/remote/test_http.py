"""Requests to one server: what many at once cost, and connections that the server has closed meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from archon.remote.clients import REUSED_SECONDS
from archon.remote.http import KEY, Http, RefusedError, ServerError
from archon.schema.errors import ConfigError
from archon.schema.urls import require_http_url
from tests.tolerances import SOON_SECONDS

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
Serve = Callable[[int, float], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server in a thread: of how many requests it waits for before it answers any, and after how many seconds
    it closes a connection that nothing comes over."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def start(at_once: int, idle_seconds: float) -> str:
        everyone = asyncio.Barrier(at_once)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), idle_seconds)
                    length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
                    await reader.readexactly(int(length.split()[1]))
                    await everyone.wait()
                    writer.write(ANSWER)
            except (TimeoutError, asyncio.IncompleteReadError):
                writer.close()

        starting = asyncio.start_server(handle, "127.0.0.1", 0, backlog=at_once)
        server = asyncio.run_coroutine_threadsafe(starting, loop).result(SOON_SECONDS)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(SOON_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=SOON_SECONDS) if others else None


async def ask(http: Http, n: int) -> None:
    answers = await asyncio.gather(*(http.answer("/generate", {"n": i}, SOON_SECONDS) for i in range(n)))
    assert answers == [{}] * n


def calls_per_request(url: str, n: int) -> float:
    """Return how many functions are called for each of n requests at once, the second time."""
    calls = 0

    def count(frame: FrameType, event: str, value: Any) -> None:
        nonlocal calls
        calls += event == "call"

    async def twice() -> None:
        http = Http(url)
        await ask(http, n)
        sys.setprofile(count)
        try:
            await ask(http, n)
        finally:
            sys.setprofile(None)

    asyncio.run(twice())
    return calls / n


def test_a_request_costs_the_same_however_many_others_are_under_way(serve: Serve) -> None:
    """A client that looks at every connection for each request costs a trainer more than the training."""
    few, many = (calls_per_request(serve(n, SOON_SECONDS), n) for n in (5, 100))
    assert many < 1.5 * few


def test_a_connection_that_the_server_closed_while_the_loop_stood_still_is_not_used_again(serve: Serve) -> None:
    """As between two rollouts, while the trainer computes."""
    idle_seconds = REUSED_SECONDS + 0.5
    http = Http(serve(1, idle_seconds))
    with asyncio.Runner() as runner:
        assert runner.run(http.answer("/generate", {}, SOON_SECONDS)) == {}
        time.sleep(idle_seconds + 0.5)
        assert runner.run(http.answer("/generate", {}, SOON_SECONDS)) == {}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *((status, RefusedError) for status in (400, 401, 404)),
        *((status, ServerError) for status in (408, 429, 500, 503)),
    ],
)
def test_status_says_whether_the_request_or_the_server_is_at_fault(status: int, error: type[Exception]) -> None:
    """A request that the server at fault did not answer may be asked elsewhere; a refused one may not."""
    answer = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(error, match=f"status {status}"):
                await http.answer("/generate", {}, SOON_SECONDS)
            with pytest.raises(error, match=f"status {status}"):
                await asyncio.to_thread(http.get, "/version")

    asyncio.run(run())


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", ANSWER[: ANSWER.index(b"Content-Length")] + b"\r\n"])
def test_a_byte_now_and_then_is_late(head: bytes) -> None:
    """In the head or in the content: the limit is of the whole request, where a time-out of each read never ends."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.05)

    async def run() -> None:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            late = pytest.raises(ServerError, match=r"did not answer within 0.3 s")
            started = time.monotonic()
            with late:
                await http.answer("/generate", {}, 0.3)
            for send in (http.get, http.post, http.command):
                with late:
                    await asyncio.to_thread(send, "/version", seconds=0.3)
            assert time.monotonic() - started < 4 * 0.3 + SOON_SECONDS

    asyncio.run(run())


@pytest.mark.parametrize("sends_key", [True, False])
def test_the_key_is_sent_to_inference_servers_only(sends_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(ANSWER)
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", sends_key=sends_key)
            assert await asyncio.to_thread(http.get, "/schema") == {}

    asyncio.run(run())
    assert (b"Bearer secret" in heads[0]) == sends_key


@pytest.mark.parametrize(
    "url",
    [
        *("", "/v1", "file:///etc/passwd", "ftp://a", "http://", "http://:80", "http://[::1", "http://a:99999"),
        *("http://a b", "http://a:x", "http://a:0", "http://a\n", "javascript:alert(1)", "http//a", "x" * 10**5),
    ],
)
def test_urls_of_no_server_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--url: got .* expected http://HOST:PORT") as error:
        require_http_url(url, "--url")
    assert len(str(error.value)) < 250 and "\n" not in str(error.value)
