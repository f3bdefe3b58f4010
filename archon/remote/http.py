"""HTTP requests to one server, limited in time and bytes. Errors distinguish server faults from bad requests."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from archon.remote.clients import loop_client, require_package, server_session
from archon.schema.errors import RolloutError

if TYPE_CHECKING:
    import aiohttp

Result = TypeVar("Result")

CONNECT_SECONDS = 10.0
MAX_BYTES = 4 * 2**20
"""Maximum bytes of a response without an answer. vLLM's whole configuration has a tenth of this."""
MAX_ERROR_BYTES = 4096
"""Bytes that are read of an error response; a message shows 500 characters of them."""
KEY = "ARCHON_SERVERS_KEY"
"""Environment variable with the API key of the servers."""


class ServerError(RolloutError):
    """The server did not answer in time, or failed. Another server may succeed."""


class RefusedError(RolloutError):
    """The server refused the request with `status`. If all servers refuse it, the request is at fault."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """JSON client of the server at `url` (scheme, host and port).

    `seconds` limit a whole request, from the connection to the last byte, and `max_bytes` its response. Every method
    raises `ServerError` if the server is at fault, and `RefusedError` if the request is. `sends_key` is False for other
    servers than inference servers, which must not get their key; `key` is another one for them.
    """

    def __init__(self, url: str, *, sends_key: bool = True, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        # A compressed response could be a thousand times as large as its bytes.
        self._headers = {"Accept-Encoding": "identity"}
        key = key or (os.environ.get(KEY) if sends_key else None)
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._aiohttp = require_package("aiohttp")

    def get(self, path: str, seconds: float = CONNECT_SECONDS) -> Any:
        """Return the JSON of a GET request."""
        return self._json(path, run_blocking(self._exchange("GET", path, None, seconds, MAX_BYTES)))

    async def fetch(self, path: str, seconds: float = CONNECT_SECONDS) -> Any:
        """Return the JSON of a GET request on the running event loop."""
        return self._json(path, await self._exchange("GET", path, None, seconds, MAX_BYTES))

    def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = CONNECT_SECONDS,
        max_bytes: int = MAX_BYTES,
    ) -> Any:
        """Return the JSON of a POST request."""
        return self._json(path, run_blocking(self._exchange("POST", path, body, seconds, max_bytes)))

    def command(self, path: str, body: dict[str, Any] | None = None, seconds: float = CONNECT_SECONDS) -> None:
        """Send a POST request and ignore the content of the response."""
        run_blocking(self._exchange("POST", path, body, seconds, MAX_BYTES, has_content=False))

    def is_listening(self) -> bool:
        """Return whether a process accepts connections at the URL."""
        parts = urlsplit(self.url)
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), CONNECT_SECONDS):
                return True
        except OSError:
            return False

    async def answer(self, path: str, body: dict[str, Any], seconds: float, max_bytes: int = MAX_BYTES) -> Any:
        """Return the JSON of a POST request on the running event loop.

        Canceling the caller closes the connection, and so ends the request on the server.
        """
        return self._json(path, await self._exchange("POST", path, body, seconds, max_bytes))

    async def _exchange(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        seconds: float,
        max_bytes: int,
        *,
        has_content: bool = True,
    ) -> bytes:
        """Return the content of a successful response."""
        # aiohttp, because httpx scans all its connections twice per request: milliseconds with hundreds of them. Its
        # time-outs also hold for each read only, so that a byte every few seconds would never be late.
        session = await loop_client(server_session, lambda client: client.closed, lambda client: client.close())
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=min(seconds, CONNECT_SECONDS))
        options = {"headers": self._headers, "timeout": timeout, "allow_redirects": False}
        try:
            async with (
                asyncio.timeout(seconds),
                session.request(method, self.url + path, json=body, **options) as response,
            ):
                return await self._content(path, response, max_bytes, has_content)
        except TimeoutError:
            raise ServerError(f"{self.url}{path} did not answer within {seconds:g} s") from None
        except (self._aiohttp.ClientError, OSError) as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            raise ServerError(f"{self.url}{path} cannot be reached ({reason})") from None

    async def _content(self, path: str, response: aiohttp.ClientResponse, max_bytes: int, has_content: bool) -> bytes:
        """Check the head of a response, and return its content."""
        status, where = response.status, f"{self.url}{path}"
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ServerError(f"{where} answered with Content-Encoding {one_line(encoding)}; expected none")
        if not 200 <= status < 300:
            shown = b""
            async for chunk in response.content.iter_any():
                shown += chunk
                if len(shown) > MAX_ERROR_BYTES:
                    break
            message = f"{where} answered with status {status}: {one_line(shown.decode(errors='replace'))}"
            if status in (408, 429) or not 400 <= status < 500:
                raise ServerError(message)
            raise RefusedError(message, status)
        kind = response.headers.get("Content-Type", "none").partition(";")[0].strip().lower()
        if has_content and kind != "application/json":
            raise ServerError(f"{where} answered with Content-Type {one_line(kind)}; expected application/json")
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > max_bytes:
                raise ServerError(f"{where} answered with more than {max_bytes} bytes, the limit of this response")
        return bytes(content)

    def _json(self, path: str, content: bytes) -> Any:
        return parse_json(content, f"{self.url}{path}")


def parse_json(content: bytes, where: str) -> Any:
    """Return the value of a JSON text. Raises ServerError if it is none, or is nested too deeply."""
    try:
        return json.loads(content)
    except ValueError:
        shown = one_line(content[:80].decode(errors="replace"))
        raise ServerError(f"{where} did not answer with JSON, but with {shown!r}") from None
    except RecursionError:
        raise ServerError(f"{where} answered with JSON that is nested too deeply; expected a few levels") from None


def one_line(text: str) -> str:
    """Return the first 500 characters of a server's text as one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:500]).split())


def run_blocking(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine on an event loop of its own, in a thread if this one has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
