"""Loopback port of a run: metrics for Prometheus, and servers that join and leave."""

from __future__ import annotations

import hmac
import json
import os
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from archon.remote.engine import RemoteEngine
from archon.remote.http import KEY
from archon.remote.prometheus import CONTENT_TYPE, Metric, counter, gauge, render
from archon.schema.listening import listening

HOST = "127.0.0.1"
MAX_BODY = 4096


class Monitor(ThreadingHTTPServer):
    """HTTP server for `GET /metrics`, `GET /servers`, and `POST` and `DELETE /servers` with `{"url": …}`.

    Joining and leaving needs the servers' key, if they have one. `newest` returns the metrics of the last step.

    Raises:
        ConfigError: the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, newest: Callable[[], Mapping[str, Any]], engine: RemoteEngine) -> None:
        self.newest, self.engine = newest, engine
        with listening(HOST, port, "rollout.push.port"):
            super().__init__((HOST, port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, name="archon-monitor", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{HOST}:{self.server_address[1]}"

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def metrics(self) -> str:
        """Return the run's metrics in Prometheus' text format."""
        newest = {name: value for name, value in self.newest().items() if isinstance(value, int | float)}
        step = [gauge(f"archon_run_{name}", f"{name} of the last step.", value) for name, value in newest.items()]
        return render([*step, *self._fleet()])

    def _fleet(self) -> list[Metric]:
        servers, stats = list(self.engine.servers), self.engine.stats
        labels = [{"url": server.url, "kind": server.dialect.facts.kind} for server in servers]
        by_server: list[tuple[str, str, list[float]]] = [
            ("archon_server_in_fleet", "1 if the server gets requests.", [float(s.failure is None) for s in servers]),
            ("archon_server_requests", "Running requests.", [float(s.running) for s in servers]),
            ("archon_server_version", "Verified version; -1: none.", [float(_version(s.version)) for s in servers]),
            ("archon_server_answers_total", "Answers.", [float(s.answers) for s in servers]),
            ("archon_server_tokens_total", "Answer tokens.", [float(s.tokens) for s in servers]),
        ]
        metrics = []
        for name, help_text, values in by_server:
            kind: Any = "counter" if name.endswith("_total") else "gauge"
            metrics.append(Metric(name, help_text, list(zip(labels, values, strict=True)), kind))
        return [
            *metrics,
            counter("archon_servers_lost_total", "Servers that left the fleet.", stats.lost),
            counter("archon_servers_returned_total", "Servers restored between pushes.", stats.returned),
            counter("archon_requests_retried_total", "Requests retried on another server.", stats.retried),
            counter("archon_requests_resumed_total", "Answers resumed after an interruption.", stats.resumed),
        ]


def _version(version: int | None) -> int:
    return -1 if version is None else version


class _Handler(BaseHTTPRequestHandler):
    server: Monitor
    timeout = 30

    def do_GET(self) -> None:
        if not self._is_local():
            return
        engine = self.server.engine
        if self.path == "/metrics":
            self._answer(200, self.server.metrics(), CONTENT_TYPE)
        elif self.path == "/servers":
            listed = [
                {"url": s.url, "kind": s.dialect.facts.kind, "version": s.version, "failure": s.failure}
                for s in engine.servers
            ]
            self._answer(200, json.dumps({"servers": listed}), "application/json")
        else:
            self._answer(404, "there are /metrics and /servers\n")

    def do_POST(self) -> None:
        self._change("join")

    def do_DELETE(self) -> None:
        self._change("leave")

    def _change(self, action: str) -> None:
        engine, key = self.server.engine, os.environ.get(KEY)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self._is_local():
            return
        if key and not hmac.compare_digest(token.encode(), key.encode()):
            self._answer(401, f"the servers have a key: send {KEY} as bearer token\n")
        elif self.path != "/servers":
            self._answer(404, "servers join and leave at /servers\n")
        elif (url := self._url()) is None:
            self._answer(400, 'send {"url": "http://…"} as application/json\n')
        else:
            (engine.join if action == "join" else engine.leave)(url)
            self._answer(202, json.dumps({"url": url, "from": "the next push"}), "application/json")

    def _url(self) -> str | None:
        # Browsers send a CORS preflight before application/json from another site, and get no permission here.
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not length.isdecimal() or int(length) > MAX_BODY:
            return None
        try:
            url = json.loads(self.rfile.read(int(length)))["url"]
        except (ValueError, KeyError, TypeError):
            return None
        return url if isinstance(url, str) and url.startswith(("http://", "https://")) else None

    def _is_local(self) -> bool:
        # Against DNS rebinding: a foreign site name that resolves to loopback must not read the run.
        if self.headers.get("Host", "").partition(":")[0] in (HOST, "localhost"):
            return True
        self._answer(403, "only 127.0.0.1 and localhost are served\n")
        return False

    def _answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""
