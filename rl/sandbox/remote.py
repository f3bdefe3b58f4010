"""`RemoteSandbox` runs programs on a server by a small HTTP protocol, and `serve` is such a server.

A client posts JSON to `/run` with the header `Authorization: Bearer KEY`:

    {"argv": [...], "files": {name: base64}, "stdin": base64, "limits": {...}}

The answer is the `Result` as JSON (200), or `{"error": …}` for an invalid request (400), a wrong key (401), a body that
is too large (413) or too many concurrent programs (429). A service such as E2B or Daytona needs a few lines that
translate this request.

    python -m archon.rl.sandbox.remote --port 8700
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hmac
import http.client
import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

from archon.rl.sandbox.local import Sandbox
from archon.rl.sandbox.programs import (
    MAX_INPUT_BYTES,
    Content,
    Limits,
    Result,
    Runner,
    program_as_json,
)
from archon.schema.errors import SandboxError, describe_error

URL_VARIABLE, KEY_VARIABLE = "ARCHON_SANDBOX_URL", "ARCHON_SANDBOX_KEY"
MAX_BODY_BYTES = 2 * MAX_INPUT_BYTES  # base64 takes 4/3 of the bytes
MAX_ANSWER_BYTES = 64 << 20
MAX_WAITING = 256
"""Concurrent requests of a server; each waits for a worker."""
MAX_CONNECTIONS = 1024
"""Connections of a server; a further one is closed. Each takes a thread, also without the key."""
ATTEMPTS = 3
"""Attempts of a request to a server that is busy or cannot be reached."""
_RETRY_SECONDS = 1.0
_READ_SECONDS = 60.0  # to receive a request
_WAIT_SECONDS = 120.0  # for a program, beyond its wall limit: the server may be busy


class RemoteSandbox:
    """Runner that sends programs to a server; see the module for the protocol. Threads may share it.

    Args:
        url: address of the server, such as http://127.0.0.1:8700.
        key: the server's key.
        limits: limits of a program, unless `run` gets others.
    """

    def __init__(self, url: str, key: str = "", limits: Limits | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SandboxError(f"the sandbox's url is {url!r:.200}; expected one such as http://127.0.0.1:8700")
        self._parts, self._key = parts, key
        self.limits = limits or Limits()

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, Content] | None = None,
        stdin: Content = "",
        limits: Limits | None = None,
    ) -> Result:
        """Run a program on the server; see `Sandbox.run`.

        Raises:
            SandboxError: an argument is invalid, or the server refuses, cannot be reached or answers invalidly.
        """
        limits = limits or self.limits
        body = program_as_json(argv, files, stdin, limits)
        data = json.dumps(body).encode()
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(_RETRY_SECONDS * attempt)
            try:
                status, answer = self._post(data, limits.wall_seconds + _WAIT_SECONDS)
            except (OSError, http.client.HTTPException) as error:
                reason = describe_error(error)
                continue
            if status == 200:
                return _parse_result(answer)
            reason = f"status {status}: {_error_of(answer)}"
            if status not in (429, 502, 503):
                break
        raise SandboxError(f"the sandbox at {self._parts.netloc} did not run a program: {reason}")

    def close(self) -> None:
        """Do nothing: each request has its own connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _post(self, data: bytes, seconds: float) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=seconds)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
            connection.request("POST", f"{self._parts.path.rstrip('/')}/run", data, headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
        finally:
            connection.close()
        if len(answer) > MAX_ANSWER_BYTES:
            raise SandboxError(f"the sandbox at {self._parts.netloc} answered more than {MAX_ANSWER_BYTES:,} bytes")
        return response.status, answer


def _parse_result(answer: bytes) -> Result:
    try:
        result = Result(**json.loads(answer))
    except (ValueError, TypeError):
        raise SandboxError(f"the sandbox's server answered {answer[:80]!r}; expected a result") from None
    names = Limits.__dataclass_fields__
    by_limit = result.exit_code is None and isinstance(result.limit, str) and result.limit in names
    if not (
        (by_limit or (type(result.exit_code) is int and result.limit is None))
        and isinstance(result.stdout, str)
        and isinstance(result.stderr, str)
        and isinstance(result.seconds, int | float)
    ):
        raise SandboxError(f"the sandbox's server answered {answer[:80]!r}; expected a result")
    return result


def _error_of(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])[:300]
    except (ValueError, TypeError, KeyError):
        return repr(answer[:80])


class SandboxServer(ThreadingHTTPServer):
    """HTTP server of a runner.

    Args:
        runner: runs the programs.
        key: key that every request must have.
        host: address to listen on.
        port: port; 0: a free one.
        most: largest limits that a request may ask for; smaller of both hold.
    """

    daemon_threads = True

    def __init__(self, runner: Runner, key: str, host: str = "127.0.0.1", port: int = 0, most: Limits | None = None):
        if not key and host not in ("127.0.0.1", "localhost", "::1"):
            raise SandboxError(f"a server on {host} needs a key: set {KEY_VARIABLE}, or listen on 127.0.0.1")
        self.runner, self.key = runner, key
        self.most = most or Limits(wall_seconds=60.0, cpu_seconds=60.0, memory_bytes=2 << 30, output_bytes=16 << 20)
        self.places = threading.Semaphore(MAX_WAITING)
        self._connections = threading.Semaphore(MAX_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise SandboxError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from None

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, if there are not too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the exception of a request, unless its client has gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Received(io.RawIOBase):
    """Bytes of a connection that must all arrive within `seconds`."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(_READ_SECONDS)  # for the answer


def _smaller(one: Limits, other: Limits) -> Limits:
    return replace(one, **{name: min(value, getattr(other, name)) for name, value in vars(one).items()})


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    timeout = _READ_SECONDS

    def setup(self) -> None:
        """Limit the time in which the request arrives, not that of each of its parts."""
        super().setup()
        self.rfile = io.BufferedReader(_Received(self.connection, self.timeout))

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self.server.key.encode()):
            return self._answer(401, {"error": "wrong key"})
        if self.path != "/run":
            return self._answer(404, {"error": f"no route {self.path[:80]}; expected /run"})
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 18:
            return self._answer(411, {"error": "the request has no valid Content-Length"})
        if int(length) > MAX_BODY_BYTES:
            return self._answer(
                413, {"error": f"the body has {int(length):,} bytes, expected at most {MAX_BODY_BYTES:,}"}
            )
        if not self.server.places.acquire(blocking=False):
            return self._answer(429, {"error": f"{MAX_WAITING} programs are waiting; try again"})
        try:
            result = self._run(self.rfile.read(int(length)))
        except SandboxError as error:
            return self._answer(400, {"error": str(error)})
        finally:
            self.server.places.release()
        return self._answer(200, vars(result))

    def _run(self, body: bytes) -> Result:
        try:
            request = json.loads(body)
            files = {name: base64.b64decode(text, validate=True) for name, text in request["files"].items()}
            stdin = base64.b64decode(request["stdin"], validate=True)
            argv, limits = request["argv"], Limits(**request["limits"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, binascii.Error) as error:
            raise SandboxError(f"invalid request: {describe_error(error)}") from None
        return self.server.runner.run(argv, files, stdin, _smaller(limits, self.server.most))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing per request."""


def main() -> None:
    """Serve the sandbox of this machine until the process is ended."""
    parser = argparse.ArgumentParser(description="Serve the sandbox of this machine over HTTP.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--workers", type=int, help="concurrent programs; default: the number of CPUs")
    options = parser.parse_args()
    try:
        with Sandbox(workers=options.workers) as sandbox:
            key = os.environ.get(KEY_VARIABLE, "")
            server = SandboxServer(sandbox, key, options.host, options.port)
            print(f"archon: sandbox ({sandbox.isolation}) at {server.url}", flush=True)
            server.serve_forever()
    except SandboxError as error:
        sys.exit(f"archon: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
