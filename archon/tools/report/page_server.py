"""`archon report RUN_DIR --serve PORT`: the page of a run on loopback, rendered on each request."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from archon.schema.errors import UserError
from archon.schema.listening import listening
from archon.tools.report.page import render_page
from archon.tools.report.run_data import load_run

HOST = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Server of one run at `/`; `port` 0 chooses a free port. Raises ConfigError if the port cannot be used."""

    daemon_threads = True
    allow_reuse_address = False  # a second server on the same port is a mistake, not a restart

    def __init__(self, run_dir: str | Path, port: int):
        self.run_dir = Path(run_dir)
        with listening(HOST, port):
            super().__init__((HOST, port), ReportHandler)

    @property
    def url(self) -> str:
        """URL of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"


class ReportHandler(BaseHTTPRequestHandler):
    """Request handler that answers GET / with the page, anything else with 404."""

    server: ReportServer

    def do_GET(self) -> None:
        """Answer a GET request."""
        # Against DNS rebinding: a site with a name that resolves to loopback must not read the run.
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self._answer(403, "text/plain", "only the hosts 127.0.0.1 and localhost are served")
        elif self.path != "/":
            self._answer(404, "text/plain", "the report is at /")
        else:
            try:
                self._answer(200, "text/html", render_page(load_run(self.server.run_dir)))
            except UserError as error:
                self._answer(503, "text/plain", str(error))

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""


def serve_report(run_dir: str | Path, port: int) -> None:
    """Serve the page until interrupted, or raise ConfigError if the run has no metrics yet."""
    load_run(run_dir)
    with ReportServer(run_dir, port) as server:
        print(f"report of {run_dir} at {server.url} (press Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
