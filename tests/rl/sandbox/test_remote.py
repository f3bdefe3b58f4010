"""Programs on a server: the same results as here, keys, limits of requests, and servers that fail."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from archon.rl.sandbox import Limits, RemoteSandbox, Sandbox, default, remote
from archon.rl.sandbox.remote import KEY_VARIABLE, URL_VARIABLE, SandboxServer
from archon.schema.errors import SandboxError


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_remote_program_ends_as_a_local_one(sandbox: Sandbox) -> None:
    program: Any = (["python", "a/m.py", "x"], {"a/m.py": "import sys; print(sys.argv, input()); exit(3)"}, "ü\n")
    with serving(SandboxServer(sandbox, "k")) as url, RemoteSandbox(url, "k") as far:
        there, here = far.run(*program), sandbox.run(*program)
        assert replace(there, seconds=0) == replace(here, seconds=0) and there.stdout == "['a/m.py', 'x'] ü\n"
        assert far.run(["sleep", "9"], limits=Limits(wall_seconds=0.1)).limit == "wall_seconds"
        assert far.run(["cat", "b"], {"b": b"\xff"}).stdout == "�"
        with pytest.raises(SandboxError, match=r"files: got the name '\.\./b'"):
            far.run(["cat"], {"../b": ""})


def test_a_server_caps_the_limits_of_requests(sandbox: Sandbox) -> None:
    with serving(SandboxServer(sandbox, "", most=Limits(wall_seconds=0.1))) as url:
        result = RemoteSandbox(url).run(["sleep", "9"], limits=Limits(wall_seconds=5))
        assert result.limit == "wall_seconds" and result.seconds < 3


@pytest.mark.parametrize(
    ("key", "path", "body", "status", "message"),
    [
        ("", "/run", "{}", 401, "wrong key"),
        ("ü", "/run", "{}", 401, "wrong key"),
        ("k", "/other", "{}", 404, "no route /other; expected /run"),
        ("k", "/run", "{}", 400, "invalid request: KeyError: 'files'"),
        ("k", "/run", "[" * 100_000, 400, "invalid request: RecursionError"),
        ("k", "/run", '{"files": {"a": "%"}, "stdin": "", "argv": ["a"], "limits": {}}', 400, "invalid request: Error"),
        ("k", "/run", '{"files": {}, "stdin": "", "argv": ["a"], "limits": {"b": 1}}', 400, "invalid request: TypeErr"),
        ("k", "/run", '{"files": {}, "stdin": "", "argv": [], "limits": {}}', 400, "argv: got []"),
    ],
)
def test_an_invalid_request_is_refused(
    sandbox: Sandbox, key: str, path: str, body: str, status: int, message: str
) -> None:
    with serving(SandboxServer(sandbox, "k")) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request("POST", path, body, {"Authorization": f"Bearer {key}".encode()})
        response = connection.getresponse()
        assert response.status == status and json.loads(response.read())["error"].startswith(message)
        connection.close()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(sandbox: Sandbox) -> None:
    with serving(SandboxServer(sandbox, "")) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.putrequest("POST", "/run")
        connection.putheader("Content-Length", str(remote.MAX_BODY_BYTES + 1))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413 and b"expected at most 134,217,728" in response.read()
        connection.close()


def drip(client: socket.socket, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.sendall(b"a")
        time.sleep(0.05)


@pytest.mark.parametrize("start", [b"POST /run", b"POST /run HTTP/1.0\r\nContent-Length: 99\r\n\r\n"])
def test_a_request_that_drips_ends(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(remote._Handler, "timeout", 0.3)
    server = SandboxServer(sandbox, "")
    with serving(server) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(start)
        with pytest.raises(ConnectionError):
            drip(client, 2)
        assert RemoteSandbox(url).run(["echo", "a"]).ok


def test_connections_beyond_the_maximum_are_closed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(remote, "_RETRY_SECONDS", 0.1)
    with serving(SandboxServer(sandbox, "k")) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        one, two, three = [socket.create_connection(address, timeout=5) for _ in range(3)]
        with one, two, three:
            assert three.recv(1) == b""
        assert RemoteSandbox(url, "k").run(["echo", "a"]).ok  # asked again if the server has not seen their ends


def test_a_client_that_goes_is_no_error_of_the_server(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    server = SandboxServer(sandbox, "")
    server.daemon_threads = False  # its end waits for them
    with serving(server) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        client.sendall(b"POST /run HTTP/1.0\r\nContent-Length: 99\r\n\r\n")
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_wrong_key_is_named_at_once(sandbox: Sandbox) -> None:
    message = r"the sandbox at .* did not run a program: status 401: wrong key"
    with serving(SandboxServer(sandbox, "k")) as url, pytest.raises(SandboxError, match=message):
        RemoteSandbox(url, "other").run(["true"])


class Faulty(BaseHTTPRequestHandler):
    answers: list[tuple[int, bytes]] = []  # noqa: RUF012 - set by each test

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, answer = self.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *values: object) -> None:
        pass


GOOD = b'{"exit_code": 0, "limit": null, "stdout": "a", "stderr": "", "seconds": 0.1}'


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_RETRY_SECONDS", 0.01)
    Faulty.answers = [(429, b"{}"), (503, b"x"), (200, GOOD)]
    with serving(HTTPServer(("127.0.0.1", 0), Faulty)) as url:
        assert RemoteSandbox(url).run(["a"]).stdout == "a"
        Faulty.answers = [(429, b'{"error": "full"}')] * 3
        with pytest.raises(SandboxError, match="status 429: full"):
            RemoteSandbox(url).run(["a"])
    with pytest.raises(SandboxError, match="did not run a program: ConnectionRefusedError"):
        RemoteSandbox(url).run(["a"])


@pytest.mark.unsampled
@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"[]", b"{}", b'{"exit_code": 0}', GOOD.replace(b"0,", b'"0",', 1), GOOD.replace(b"null", b'"x"')),
        *(GOOD.replace(b"0,", b"null,", 1), GOOD.replace(b'"a"', b"1"), GOOD.replace(b"0,", b"true,", 1)),
    ],
)
def test_an_invalid_answer_is_an_error(answer: bytes) -> None:
    Faulty.answers = [(200, answer)]
    server = HTTPServer(("127.0.0.1", 0), Faulty)
    with serving(server) as url, pytest.raises(SandboxError, match=r"server answered .*; expected a result"):
        RemoteSandbox(url).run(["a"])


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://a", "http://"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(SandboxError, match="expected one such as http://127"):
        RemoteSandbox(url)


def test_a_server_for_others_needs_a_key(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match=r"a server on 0\.0\.0\.0 needs a key: set ARCHON_SANDBOX_KEY"):
        SandboxServer(sandbox, "", "0.0.0.0")


@pytest.mark.usefixtures("sandbox")
def test_the_command_serves_and_an_environment_variable_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "archon.rl.sandbox.remote", "--port", "0", "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {KEY_VARIABLE: "k"})
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[-1]
        monkeypatch.setenv(URL_VARIABLE, url)
        monkeypatch.setenv(KEY_VARIABLE, "k")
        monkeypatch.setattr(default, "_runners", {})
        runner = default.default_runner()
        assert isinstance(runner, RemoteSandbox) and runner is default.default_runner()
        assert runner.run(["echo", "far"]).stdout == "far\n"
    finally:
        process.send_signal(2)
        process.communicate(timeout=20)
