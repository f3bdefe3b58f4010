"""A server of rollouts behind a proxy, which does harm to it at a chosen moment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from archon.remote.http import KEY
from benchmarks.harness import ROOT, BenchmarkError
from benchmarks.namespaces import Cable

KINDS = ("kill", "stop", "drop", "garbage", "version")
MOMENTS = ("answer", "push")
CUT_SECONDS = 10.0
GARBAGE: tuple[bytes, ...] = (
    b"<html>502 Bad Gateway</html>",
    b'{"output_ids": [1, 2',
    b"[]",
    b'{"output_ids": [1, 2], "logprobs": [-1.0], "versions": [0, 0], "stop_reason": "stop"}',
    b'{"output_ids": [999999], "logprobs": [-1.0], "versions": [0], "stop_reason": "stop"}',
    b'{"output_ids": ["a"], "logprobs": [-1.0], "versions": [0], "stop_reason": "stop"}',
    b'{"output_ids": [1], "logprobs": [NaN], "versions": [0], "stop_reason": "stop"}',
    b'{"output_ids": [1], "logprobs": [-1.0], "versions": ["new"], "stop_reason": "stop"}',
    b'{"logprobs": [0.5], "version": null}',
)
_ROUTES = "/v1/rollout"
_HARM_SECONDS = 0.005
"""After which harm is done to a request: it has reached the server, which has not answered yet."""


class Served:
    """`archon serve` on loopback behind a proxy that injects one fault, chosen by `plan`.

    Args:
        number: index in logs and records.
        model: initial checkpoint.
        root: push directory.
        folder: log directory.
        stopped: seconds of a `stop`.
        cable: cable that `cut` unplugs; the proxy listens on its first host, this process's. None: on loopback.
    """

    def __init__(
        self, number: int, model: Path, root: Path, folder: Path, stopped: float, cable: Cable | None = None
    ) -> None:
        self.number, self._model, self._root = number, model, root
        self._log, self._stopped, self._cable = folder / f"server-{number}.log", stopped, cable
        self._port = 0
        self.start_seconds = 0.0  # of the last start
        self._planned: tuple[str, str, int] | None = None
        self.done = threading.Event()
        self._start()

    def _start(self) -> None:
        started = time.monotonic()
        command = [sys.executable, "-m", "archon", "serve", self._model, "--port", self._port]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--push-root", str(self._root), "device=cpu"],
                env=os.environ | {"ARCHON_TOKEN": os.environ[KEY], "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " at http://127.0.0.1:" not in line:
            raise BenchmarkError(f"server {self.number} did not start: {line}{self._log.read_text()[-2000:]}")
        self._port = int(line.split(" at http://127.0.0.1:")[1].partition("/")[0])
        self.start_seconds = time.monotonic() - started

    def plan(self, kind: str, moment: str, which: int) -> None:
        """Do harm of a kind to the next request of that moment, then sets `done`; `which` chooses among several."""
        self.done.clear()
        self._planned = kind, moment, which

    def start_again(self) -> None:
        """Start the server again if it is dead."""
        if self.process.poll() is not None:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._start()

    def end(self) -> None:
        """End the server, however it is."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    async def serve(self) -> str:
        """Start the proxy on the running event loop. Returns its URL."""
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        host = "127.0.0.1" if self._cable is None else self._cable.addresses[0]
        await web.TCPSite(self._runner, host, 0).start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """End the proxy."""
        await self._runner.cleanup()
        await self._client.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        kind, which = "", 0
        if self._planned is not None and _is_moment(request, *self._planned[:2]):
            kind, _, which = self._planned
            self._planned = None
        harm = asyncio.create_task(self._harm(kind, request)) if kind else None
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        try:
            url = f"http://127.0.0.1:{self._port}{request.path}"
            async with self._client.request(request.method, url, data=body, headers=headers) as found:
                status, content = found.status, await found.read()
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)
        finally:
            if harm is not None:
                await asyncio.shield(harm)
        if kind == "garbage":
            content = GARBAGE[which % len(GARBAGE)]
        elif kind == "version":
            content = _other_version(content, which)
        return web.Response(status=status, body=content, content_type="application/json")

    async def _harm(self, kind: str, request: web.Request) -> None:
        await asyncio.sleep(_HARM_SECONDS)
        later = asyncio.get_running_loop().call_later
        if kind == "kill":
            self.process.kill()
        elif kind == "stop":
            self.process.send_signal(signal.SIGSTOP)
            later(self._stopped, self.process.send_signal, signal.SIGCONT)
        elif kind == "drop" and request.transport is not None:
            request.transport.abort()
        elif kind == "cut" and self._cable is not None:
            self._cable.pull()
            later(CUT_SECONDS, self._cable.plug)
        self.done.set()


def _is_moment(request: web.Request, kind: str, moment: str) -> bool:
    """Return whether a request asks for an answer or a push; for `version`, a push with a response to read."""
    if moment == "answer":
        return request.path == f"{_ROUTES}/generate"
    if kind not in ("garbage", "version"):
        return request.path == f"{_ROUTES}/weights"
    is_version = request.path == _ROUTES
    return is_version if kind == "version" else is_version or request.path == f"{_ROUTES}/score"


def _other_version(content: bytes, which: int) -> bytes:
    """Return a response with versions that were never pushed."""
    body = json.loads(content)
    other = (-1, 10**6)[which % 2]
    if "versions" in body:
        body["versions"] = [other] * len(body["versions"])
    return json.dumps(body | ({"version": other} if "version" in body else {})).encode()


@contextmanager
def proxies(servers: list[Served]) -> Iterator[list[str]]:
    """Yield the URLs of the servers' proxies, on an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        yield [run(server.serve()) for server in servers]
    finally:
        for server in servers:
            with suppress(Exception):
                run(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
