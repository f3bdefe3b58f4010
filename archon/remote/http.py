"""HTTP requests to one server with time-outs, and errors that separate server faults from bad requests."""

from __future__ import annotations

import json
import os
import socket
from typing import Any
from urllib.parse import urlsplit

from archon.remote.clients import loop_session, require_package, tls_context
from archon.schema.errors import RolloutError

CONNECT_SECONDS = 10.0
KEY = "ARCHON_SERVERS_KEY"
"""Environment variable with the API key of the servers."""


class ServerError(RolloutError):
    """The server did not answer in time, or failed. Another server may succeed."""


class RefusedError(RolloutError):
    """The server refused the request with `status`. Every other server would, too."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """JSON client of the server at `url` (scheme, host and port).

    Every method raises `ServerError` if the server is at fault, and `RefusedError` if the request is.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
        self._httpx, self._aiohttp = require_package("httpx"), require_package("aiohttp")

    def get(self, path: str, seconds: float = CONNECT_SECONDS) -> Any:
        """Return the JSON of a GET request."""
        return self._send("GET", path, None, seconds)

    def post(self, path: str, body: dict[str, Any] | None = None, seconds: float = CONNECT_SECONDS) -> Any:
        """Return the JSON of a POST request."""
        return self._send("POST", path, body, seconds)

    def command(self, path: str, body: dict[str, Any] | None = None, seconds: float = CONNECT_SECONDS) -> None:
        """Send a POST request and ignore the content of the response."""
        self._send("POST", path, body, seconds, has_content=False)

    def is_listening(self) -> bool:
        """Return whether a process accepts connections at the URL."""
        parts = urlsplit(self.url)
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), CONNECT_SECONDS):
                return True
        except OSError:
            return False

    async def answer(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        """Return the JSON of a POST request on the running event loop.

        Canceling the caller closes the connection, and so ends the request on the server.
        """
        # aiohttp, because httpx scans all its connections twice per request: milliseconds with hundreds of them.
        session = await loop_session()
        timeout = self._aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_SECONDS))
        sent = session.post(self.url + path, json=body, headers=self._headers, timeout=timeout, allow_redirects=False)
        try:
            async with sent as response:
                content = await response.read()
        except (TimeoutError, self._aiohttp.ClientError) as error:
            raise self._failure(path, seconds, error) from None
        return self._content(path, response.status, content)

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, *, has_content: bool = True
    ) -> Any:
        try:
            timeout = self._httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
            with self._httpx.Client(trust_env=False, timeout=timeout, verify=tls_context()) as client:
                response = client.request(method, self.url + path, json=body, headers=self._headers)
        except self._httpx.HTTPError as error:
            raise self._failure(path, seconds, error) from None
        return self._content(path, response.status_code, response.content, has_content)

    def _failure(self, path: str, seconds: float, error: Exception) -> ServerError:
        if isinstance(error, TimeoutError | self._httpx.TimeoutException):
            return ServerError(f"{self.url}{path} did not answer within {seconds:g} s")
        return ServerError(f"{self.url}{path} cannot be reached ({type(error).__name__}: {error})")

    def _content(self, path: str, status: int, content: bytes, has_content: bool = True) -> Any:
        if status >= 400:
            message = f"{self.url}{path} answered with status {status}: {content.decode(errors='replace')[:500]}"
            if status in (408, 429) or status >= 500:
                raise ServerError(message)
            raise RefusedError(message, status)
        if not has_content:
            return None
        try:
            return json.loads(content)
        except ValueError:
            raise ServerError(f"{self.url}{path} did not answer with JSON") from None
