"""Requests to one server, with a time-out each, and errors that say whether the request or the server is at fault."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit

from archon.remote.clients import http_client, loop_client, require_package
from archon.schema.errors import RolloutError

CONNECT_SECONDS = 10.0
KEY = "ARCHON_SERVERS_KEY"
"""The environment variable with the key that servers ask for."""


class ServerError(RolloutError):
    """The server did not answer, answered too late, or failed; another server may be asked."""


class RefusedError(RolloutError):
    """The server refused the request, as every other one would; `status` is that of its answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """Sends JSON to the server at `url` (scheme, host and port) and returns JSON.

    Every method raises `ServerError` where the server is at fault, and `RefusedError` where the request is.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
        self._httpx = require_package("httpx")

    def get(self, path: str, seconds: float = CONNECT_SECONDS) -> Any:
        return self._send("GET", path, None, seconds)

    def post(self, path: str, body: dict[str, Any] | None = None, seconds: float = CONNECT_SECONDS) -> Any:
        return self._send("POST", path, body, seconds)

    def command(self, path: str, body: dict[str, Any] | None = None, seconds: float = CONNECT_SECONDS) -> None:
        """Posts what is answered by its status alone."""
        self._send("POST", path, body, seconds, has_content=False)

    def listens(self) -> bool:
        """Returns whether anything accepts connections at the URL."""
        parts = urlsplit(self.url)
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), CONNECT_SECONDS):
                return True
        except OSError:
            return False

    async def answer(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        """Posts on the running event loop. A caller that is canceled closes the connection, which ends the request."""
        client = await loop_client(http_client, lambda client: client.is_closed, lambda client: client.aclose())
        try:
            response = await client.post(
                self.url + path, json=body, headers=self._headers, timeout=self._timeout(seconds)
            )
        except self._httpx.HTTPError as error:
            raise self._failure(path, seconds, error) from None
        return self._content(path, response)

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, *, has_content: bool = True
    ) -> Any:
        try:
            with self._httpx.Client(trust_env=False, timeout=self._timeout(seconds)) as client:
                response = client.request(method, self.url + path, json=body, headers=self._headers)
        except self._httpx.HTTPError as error:
            raise self._failure(path, seconds, error) from None
        return self._content(path, response, has_content)

    def _timeout(self, seconds: float) -> Any:
        return self._httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))

    def _failure(self, path: str, seconds: float, error: Exception) -> ServerError:
        if isinstance(error, self._httpx.TimeoutException):
            return ServerError(f"{self.url}{path} did not answer within {seconds:g} s")
        return ServerError(f"{self.url}{path} cannot be reached ({type(error).__name__}: {error})")

    def _content(self, path: str, response: Any, has_content: bool = True) -> Any:
        if response.status_code >= 400:
            message = f"{self.url}{path} answered with status {response.status_code}: {response.text[:500]}"
            if response.status_code in (408, 429) or response.status_code >= 500:
                raise ServerError(message)
            raise RefusedError(message, response.status_code)
        if not has_content:
            return None
        try:
            return response.json()
        except ValueError:
            raise ServerError(f"{self.url}{path} answered with something other than JSON") from None
