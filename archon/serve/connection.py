"""One client's connection: uvicorn's HTTP parser, with the limits that it lacks.

All that depends on how uvicorn is made inside stands here.
"""

from __future__ import annotations

import asyncio
import json
from email.utils import formatdate

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from archon.serve.errors import Failure, error_body
from archon.serve.service import Service

KEEP_ALIVE_SECONDS = 3600  # between two requests: a client must not meet a closed connection when it asks again


def configured(app: FastAPI) -> uvicorn.Config:
    """Returns uvicorn's settings for `app`; errors are logged by `app` itself."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


class Connection(HttpToolsProtocol):
    """Closed when a request's headers do not come in time; too many or too long headers, and what is no HTTP at all,
    are status 400 with a JSON body."""

    def __init__(self, config: uvicorn.Config, state: ServerState, service: Service) -> None:
        super().__init__(config, state, {"service": service})  # which a request finds in its `state`
        self._limits = service.limits
        self._deadline: asyncio.TimerHandle | None = None  # while a request's headers are due
        self._received = 0  # bytes since then
        self._refusal: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is not None and not self.transport.is_closing():
            self._received += len(data)
            if self._received > self._limits.header_bytes * self._limits.headers:
                self.send_400_response("the headers are too long")

    def on_message_begin(self) -> None:
        if self._deadline is None:
            self._expect_headers()
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self._limits
        if len(self.headers) >= limits.headers:
            self._refusal = f"the request has more than {limits.headers} headers"
        elif len(name) + len(value) > limits.header_bytes:
            self._refusal = f"the header {name[:80]!r} is longer than {limits.header_bytes} bytes"
        if self._refusal is not None:
            raise ValueError(self._refusal)  # which ends the parsing
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_came()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(error_body(Failure(400, self._refusal or msg), "")).encode()
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _expect_headers(self) -> None:
        self._received = 0
        self._deadline = self.loop.call_later(self._limits.request_seconds, self.transport.close)

    def _headers_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
