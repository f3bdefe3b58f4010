"""HTTP clients for agents, workflows and servers; httpx and aiohttp are imported on first use."""

from __future__ import annotations

import asyncio
import importlib
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp
    import httpx

Client = TypeVar("Client")

REUSED_SECONDS = 2.0
"""Seconds until an idle connection expires. uvicorn (vLLM, SGLang) closes idle connections after 5 s. A blocked event
loop does not notice this, and would send its next request into a closed connection."""


def http_client() -> httpx.AsyncClient:
    """Return a client without proxies, time-outs or a connection limit."""
    httpx = require_package("httpx")
    # The work of httpx per request is quadratic in idle connections: 9 ms with 100 of them, 2 ms with 10.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=10)
    return httpx.AsyncClient(trust_env=False, timeout=None, verify=tls_context(), limits=limits)


def aiohttp_session() -> aiohttp.ClientSession:
    """Return a session without proxies, time-outs or a connection limit."""
    aiohttp = require_package("aiohttp")
    return aiohttp.ClientSession(connector=_connector(), timeout=aiohttp.ClientTimeout(total=None))


def server_session() -> aiohttp.ClientSession:
    """Return a session for inference servers: like `aiohttp_session`, without cookies and without decompression."""
    aiohttp = require_package("aiohttp")
    return aiohttp.ClientSession(connector=_connector(), auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())


def _connector() -> aiohttp.TCPConnector:
    aiohttp = require_package("aiohttp")
    return aiohttp.TCPConnector(ssl=tls_context(), limit=0, keepalive_timeout=REUSED_SECONDS)


async def loop_session() -> aiohttp.ClientSession:
    """Return the shared session of the running event loop, which is closed with the loop."""
    return await loop_client(aiohttp_session, lambda session: session.closed, lambda session: session.close())


def require_package(package: str) -> Any:
    """Return the module `package`. Raises `ConfigError` if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"this feature needs the package {package}, which is not installed; "
            "install archon's extra `rl`: pip install 'archon-engine[rl]'"
        ) from None


@cache
def tls_context() -> ssl.SSLContext:
    """Return the default TLS context, loaded once because loading is slow."""
    return ssl.create_default_context()


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


async def loop_client(
    make: Callable[[], Client], is_closed: Callable[[Client], bool], close: Callable[[Client], Awaitable[None]]
) -> Client:
    """Return the client of the running event loop; create it at the first call or after it was closed.

    The client is closed with its loop: an asynchronous generator holds it, and `asyncio.run` and `asyncio.Runner` close
    the asynchronous generators of their loop.
    """
    loop = asyncio.get_running_loop()
    clients = _clients.setdefault(loop, {})
    if make not in clients or is_closed(clients[make][0]):
        client = make()

        async def hold() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                if make in clients and clients[make][0] is client:  # not its successor
                    del clients[make]
                await close(client)

        holder = hold()
        clients[make] = client, holder
        await anext(holder)
    shared: Client = clients[make][0]
    return shared
