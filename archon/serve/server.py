"""The HTTP server: uvicorn with additional connection limits. All uses of uvicorn's internals are here."""

from __future__ import annotations

import asyncio
import json
from email.utils import formatdate
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from archon.schema.listening import listening
from archon.serve import metrics_route, rollout_routes
from archon.serve.error_responses import ErrorResponse, error_body
from archon.serve.request_log import RequestLog
from archon.serve.routes import app
from archon.serve.service import Limits, Service, check_host

app.include_router(rollout_routes.router)
app.include_router(metrics_route.router)

KEEP_ALIVE_SECONDS = 3600  # between two requests; a client that reuses its connection must not find it closed


class HTTPServer:
    """Serves an app on the caller's event loop without touching its signal handlers.

    Start and close it on the same loop. The app finds the server as `request.state.service`.
    """

    limits: Limits
    port: int
    _listener: asyncio.Server | None = None

    def asgi(self) -> Any:
        """Return the app."""
        raise NotImplementedError

    async def listen(self, host: str, port: int, token: str | None) -> str:
        """Start to listen and return the base URL; port 0 selects a free port.

        Raises:
            ConfigError: a host other than loopback without a token, or an address that cannot be used.
        """
        host = host.removeprefix("[").removesuffix("]")
        check_host(host, token)
        config = uvicorn.Config(
            self.asgi(),
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # the app logs its errors
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._state = ServerState()
        loop = asyncio.get_running_loop()
        with listening(host, port):
            self._listener = await loop.create_server(lambda: Connection(config, self._state, self), host, port)
        self.port = self._listener.sockets[0].getsockname()[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def stop_listening(self) -> bool:
        """Stop listening, abort every connection, cancel the requests in progress and wait for their end.

        Returns whether the server was listening.
        """
        if self._listener is None:
            return False
        self._listener.close()
        self._listener = None
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        return True


class AgentServer(HTTPServer, Service):
    """Serves the OpenAI and Anthropic protocols."""

    def asgi(self) -> Any:
        """Return the app, with a log of requests if it was requested."""
        return RequestLog(app) if self.log_requests else app

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Start to listen and return the base URL, which ends in /v1; see `HTTPServer.listen`."""
        return f"{await self.listen(host, port, self._token)}/v1"

    async def close(self) -> None:
        """Stop listening, end all requests, and release the threads that prepare them."""
        if await self.stop_listening():
            self.preparation.close()


class Connection(HttpToolsProtocol):
    """A connection with limits of its headers.

    Slow headers close it. Too many or too long headers, and bytes that are not HTTP, get status 400 with a JSON body.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, service: HTTPServer) -> None:
        super().__init__(config, state, {"service": service})  # the last becomes each request's `state`
        self._limits = service.limits
        self._timeout: asyncio.TimerHandle | None = None  # while a request's headers are incomplete
        self._received = 0  # bytes in that time
        self._refusal: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the headers."""
        super().connection_made(transport)
        self._expect_headers()
        if len(self.connections) > self._limits.connections:
            message = f"the server has {self._limits.connections} connections, the maximum; try again"
            self._refuse(ErrorResponse(503, message), "503 Service Unavailable\r\nRetry-After: 1")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._cancel_timeout()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass received data to the parser."""
        super().data_received(data)
        if self._timeout is not None and not self.transport.is_closing():
            self._received += len(data)
            if self._received > self._limits.header_bytes * self._limits.headers:
                self.send_400_response("the headers are too long")

    def on_message_begin(self) -> None:
        """Reset the header counters."""
        if self._timeout is None:
            self._expect_headers()
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header against the limits."""
        limits = self._limits
        if len(self.headers) >= limits.headers:
            self._refusal = f"the request has more than {limits.headers} headers"
        elif len(name) + len(value) > limits.header_bytes:
            self._refusal = f"the header {name[:80]!r} is longer than {limits.header_bytes} bytes"
        if self._refusal is not None:
            raise ValueError(self._refusal)  # stops the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the time limit of the headers."""
        self._cancel_timeout()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with a JSON error."""
        self._refuse(ErrorResponse(400, self._refusal or msg), "400 Bad Request")

    def _refuse(self, error: ErrorResponse, status: str) -> None:
        body = json.dumps(error_body(error, "")).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _expect_headers(self) -> None:
        self._received = 0
        self._timeout = self.loop.call_later(self._limits.request_seconds, self.transport.close)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
