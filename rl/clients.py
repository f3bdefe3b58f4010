"""HTTP clients for agents and workflows; each package is imported when it is asked for."""

from __future__ import annotations

import asyncio
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


def http_client() -> httpx.AsyncClient:
    """Returns a client that uses no proxy, waits without limit, and opens as many connections as are needed."""
    try:
        import httpx
    except ImportError:
        raise missing_package("httpx") from None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.AsyncClient(trust_env=False, timeout=None, verify=tls_context(), limits=limits)


def aiohttp_session() -> aiohttp.ClientSession:
    """Returns a session that uses no proxy, waits without limit, and raises no status as an error."""
    try:
        import aiohttp
    except ImportError:
        raise missing_package("aiohttp") from None
    connector = aiohttp.TCPConnector(ssl=tls_context(), limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


def missing_package(package: str) -> ConfigError:
    """Returns the error for a client whose `package` is not installed."""
    return ConfigError(
        f"agents need the package {package}, which is not installed; "
        "install archon's extra `rl`: pip install 'archon-engine[rl]'"
    )


@cache
def tls_context() -> ssl.SSLContext:
    """Returns the TLS context of the trusted authorities; loading it takes longer than a small model's answer."""
    return ssl.create_default_context()


_kept: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, tuple[Any, AsyncGenerator[None, None]]]]
_kept = WeakKeyDictionary()


async def loop_client(
    make: Callable[[], Client], is_closed: Callable[[Client], bool], close: Callable[[Client], Awaitable[None]]
) -> Client:
    """Returns the running loop's client, made at the first call, or when it has been closed.

    It is closed with its loop: `asyncio.run` and `asyncio.Runner` end a loop's asynchronous generators, one of which
    holds the client.
    """
    loop = asyncio.get_running_loop()
    clients = _kept.setdefault(loop, {})
    if make not in clients or is_closed(clients[make][0]):
        client = make()

        async def hold() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                if make in clients and clients[make][0] is client:  # and not its successor
                    del clients[make]
                await close(client)

        holder = hold()
        clients[make] = client, holder
        await anext(holder)
    found: Client = clients[make][0]
    return found
