"""`archon serve` for trainers: in a thread, or as a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from archon.cli.serve import make_server
from archon.cli.serve_config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "secret"


@contextmanager
def serving(checkpoint: Path, root: Path, **config: Any) -> Iterator[tuple[Any, str]]:
    """The server, on an event loop in a thread, and its URL; trainers push from folders in `root`."""
    server = make_server(checkpoint, ServeConfig(device="cpu", **config), TOKEN, push_root=root)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        url = asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
        yield server, url.removesuffix("/v1")
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


class ServeProcess:
    """`archon serve` as a process of its own, on a free port unless `port` is given; `before` stands before it."""

    def __init__(
        self,
        checkpoint: Path,
        root: Path,
        log: Path,
        port: int = 0,
        host: str = "127.0.0.1",
        before: Sequence[str] = (),
    ) -> None:
        command = [*before, sys.executable, "-m", "archon", "serve", checkpoint, "--host", host, "--port", port]
        command += ["--push-root", root]
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*map(str, command), "device=cpu"],
                env=os.environ | {"ARCHON_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def wait(self) -> str:
        """Return its URL once it listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"at (http://\S+)/v1", line)
        assert found, line + self.log.read_text()
        return found[1]

    def stop(self) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
