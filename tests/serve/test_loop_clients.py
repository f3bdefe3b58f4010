"""`workflow_context`'s HTTP clients: one a loop, closed with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from archon.rl.episode_context import workflow_context
from archon.schema.errors import ConfigError
from tests.serve.scripted import Start
from tests.tolerances import SOON_SECONDS


def get(kind: str) -> Any:
    return workflow_context.get_httpx_client() if kind == "httpx" else workflow_context.get_aiohttp_session()


def closed(client: Any) -> bool:
    return bool(client.is_closed if hasattr(client, "is_closed") else client.closed)


@pytest.mark.parametrize("kind", ["httpx", "aiohttp"])
def test_a_loop_has_one_client_and_closes_it(kind: str) -> None:
    async def several() -> list[Any]:
        clients = await asyncio.gather(*(get(kind) for _ in range(3)))
        assert not closed(clients[0])
        return clients

    first, second = asyncio.run(several()), asyncio.run(several())
    assert len(set(map(id, first))) == len(set(map(id, second))) == 1
    assert first[0] is not second[0]
    assert closed(first[0]) and closed(second[0])


@pytest.mark.parametrize("kind", ["httpx", "aiohttp"])
async def test_one_that_was_closed_is_replaced(kind: str) -> None:
    client = await get(kind)
    await (client.aclose() if kind == "httpx" else client.close())
    other = await get(kind)
    assert other is not client and not closed(other)
    assert await get(kind) is other
    for _ in range(9):  # in which what had held the first one ends
        await asyncio.sleep(0)
    assert await get(kind) is other and not closed(other)


async def test_both_ask(serve: Start) -> None:
    _, url = await serve()
    answer = await (await workflow_context.get_httpx_client()).get(f"{url}/models")
    async with (await workflow_context.get_aiohttp_session()).get(f"{url}/models") as other:
        assert await other.json() == answer.json()


@pytest.mark.parametrize("kind", ["httpx", "aiohttp"])
async def test_as_many_requests_are_under_way_as_are_made(kind: str) -> None:
    """The server answers none before all have come; both packages allow 100 of themselves."""
    n, answer = 130, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    everyone = asyncio.Barrier(n)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await everyone.wait()
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def ask(client: Any, url: str) -> int:
        response = await client.get(url)
        return int(response.status_code if kind == "httpx" else response.status)

    async with await asyncio.start_server(handle, "127.0.0.1", 0, backlog=n) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        client = await get(kind)
        async with asyncio.timeout(SOON_SECONDS):
            assert await asyncio.gather(*(ask(client, url) for _ in range(n))) == [200] * n


@pytest.mark.parametrize("kind", ["httpx", "aiohttp"])
async def test_without_the_package_the_extra_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=f"needs the package {kind}, which is not installed; install archon's extra"):
        await get(kind)


def test_neither_package_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, archon.rl.episode_context; print([name for name in ('aiohttp', 'httpx') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
