"""A local stand-in of the Hugging Face hub: repositories of files, over HTTP on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Server of `repositories`: by name, such as `models/owner/name`, the content of each file."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        hub = cast(HubServer, self.server)
        hub.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0].strip("/").removeprefix("api/")
        for name, files in hub.repositories.items():
            for prefix in (name, name.removeprefix("models/")):
                if path == prefix or path.startswith(f"{prefix}/"):
                    self._answer(name, files, *f"{path.removeprefix(prefix).strip('/')}//".split("/", 2))
                    return
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks up

    def _answer(self, name: str, files: Mapping[str, bytes], action: str, revision: str, file: str) -> None:
        file = file.rstrip("/")
        if action != "" and revision not in ("main", "v1", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif action == "resolve" and file in files:
            self._send(200, files[file], {"ETag": f'"{_digest(files[file])}"', "X-Repo-Commit": COMMIT})
        elif action == "resolve":
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif action == "tree":
            self._send(200, json.dumps(_tree(files, file, recursive="recursive=true" in self.path.lower())).encode())
        else:
            siblings = [{"rfilename": key} for key in files]
            info = {"id": name.partition("/")[2], "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self._send(200, json.dumps(info).encode())

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _tree(files: Mapping[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    """Return the files below a folder, or its files and folders."""
    start = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in files.items():
        below = path.removeprefix(start)
        if path.startswith(start) and (recursive or "/" not in below):
            entries[path] = {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
        elif path.startswith(start):
            inner = start + below.partition("/")[0]
            entries[inner] = {"type": "directory", "path": inner, "size": 0, "oid": "0"}
    return [*entries.values()]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[HubServer]:
    """Serve repositories in a thread."""
    with HubServer(repositories) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
