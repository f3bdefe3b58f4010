"""HTTP clients for agents, workflows and servers, whose packages are imported on first use."""

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
"""Until when an idle connection may be used again. uvicorn, so vLLM and SGLang, closes it after 5 s, which a loop that
did not run meanwhile has not seen: it would send a request into a connection that is closed."""


def http_client() -> httpx.AsyncClient:
    """Return a client without proxies, time-outs and a limit on connections."""
    httpx = require_package("httpx")
    # For each request httpx looks, for each idle connection, at all: 9 ms where there are 100, 2 ms where 10 are kept.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=10)
    return httpx.AsyncClient(trust_env=False, timeout=None, verify=tls_context(), limits=limits)


def aiohttp_session() -> aiohttp.ClientSession:
    """Return a session without proxies, time-outs and a limit on connections."""
    aiohttp = require_package("aiohttp")
    connector = aiohttp.TCPConnector(ssl=tls_context(), limit=0, keepalive_timeout=REUSED_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def loop_session() -> aiohttp.ClientSession:
    """Return the running event loop's shared session, which is closed with it."""
    return await loop_client(aiohttp_session, lambda session: session.closed, lambda session: session.close())


def require_package(package: str) -> Any:
    """Return the module `package`; raises `ConfigError` where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"this needs the package {package}, which is not installed; "
            "install archon's extra `rl`: pip install 'archon-engine[rl]'"
        ) from None


@cache
def tls_context() -> ssl.SSLContext:
    """Return the default TLS context, which takes long to load."""
    return ssl.create_default_context()


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


async def loop_client(
    make: Callable[[], Client], is_closed: Callable[[Client], bool], close: Callable[[Client], Awaitable[None]]
) -> Client:
    """Return the running loop's client, made at the first call, or after it was closed.

    It is closed with its loop: `asyncio.run` and `asyncio.Runner` close a loop's asynchronous generators, one of which
    holds the client.
    """
    loop = asyncio.get_running_loop()
    clients = _clients.setdefault(loop, {})
    if make not in clients or is_closed(clients[make][0]):
        client = make()

        async def hold() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                if make in clients and clients[make][0] is client:  # not a later one
                    del clients[make]
                await close(client)

        holder = hold()
        clients[make] = client, holder
        await anext(holder)
    shared: Client = clients[make][0]
    return shared
