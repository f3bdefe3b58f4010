"""Every failure as JSON in the format of the API that was asked, also of what is no HTTP at all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from archon.generation.record import UnusableAnswerError
from archon.schema.errors import ConfigError, ContextOverflowError, NotFiniteError, UserError
from archon.serve.sessions import LimitError

try:
    from aiohttp import web
except ImportError:
    raise ConfigError(
        "serving agents needs the package aiohttp, which is not installed; "
        "install archon's extra `rl`: pip install 'archon-engine[rl]'"
    ) from None

# Names of errors by status: OpenAI's, Anthropic's.
_TYPES = {
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}

_LONGEST = 2000  # characters of a message, which may quote what was given


class HTTPError(Exception):
    """A request that is answered with `status` and one line; `code` is OpenAI's name of the case, where it has one."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers


def http_error(error: Exception) -> HTTPError:
    """How a request ends that failed with `error`: the user's mistakes are 4xx, ours are 500 and keep their secret."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, web.HTTPException):
        kept = {name: value for name, value in error.headers.items() if name == "Allow"}
        return HTTPError(error.status, str(error.text or error.reason), headers=kept)
    told = " ".join(str(error).split())[:_LONGEST]
    if isinstance(error, ContextOverflowError):
        return HTTPError(400, told, "context_length_exceeded")
    if isinstance(error, LimitError):
        return HTTPError(429, told)
    if isinstance(error, UnusableAnswerError | NotFiniteError):
        return HTTPError(503, told, "unusable_answer")
    if isinstance(error, UserError):
        return HTTPError(400, told)
    if isinstance(error, RecursionError):
        return HTTPError(400, "the request is nested too deeply")
    return HTTPError(500, "the server failed; its log says why")


def speaks_anthropic(path: str) -> bool:
    """Whether the clients of `path` expect errors in Anthropic's form."""
    return path.startswith("/v1/messages")


def error_body(error: HTTPError, path: str) -> dict[str, Any]:
    """The JSON of an error, as clients of that path expect it."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    openai, anthropic = _TYPES.get(error.status, (default, default))
    if speaks_anthropic(path):
        return {"type": "error", "error": {"type": anthropic, "message": error.message}}
    return {"error": {"message": error.message, "type": openai, "param": None, "code": error.code}}


class JSONRequestHandler(web.RequestHandler):
    """A connection. What aiohttp itself refuses, before there is a request to handle, is told in JSON too.

    It is closed when a request's headers do not come within `header_seconds` of their first byte, or of the connection.
    """

    __slots__ = ("_header_seconds", "_headers_due")

    def __init__(self, manager: web.Server, *, header_seconds: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._header_seconds = header_seconds
        self._headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._await_headers()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        requests = self._request_count
        if self._waiter is not None and self._headers_due is None:
            self._await_headers()
        super().data_received(data)
        if self._request_count > requests:
            self._await_no_more()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._await_no_more()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._headers_due = self._loop.call_later(self._header_seconds, self.force_close)

    def _await_no_more(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            raise exc  # the client has gone: that is no error of ours, and nobody is left to be told
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        reason = " ".join((message or "not a request of HTTP").split())[:200]
        response = web.json_response(error_body(HTTPError(status, reason), request.path), status=status)
        response.force_close()
        return response
