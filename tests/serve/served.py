"""A checkpoint behind the server of `archon serve`, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archon.cli.serve import make_server
from archon.cli.serve_config import ServeConfig


@contextmanager
def served(checkpoint: Path) -> Iterator[str]:
    """The base URL of `archon serve CHECKPOINT`, in a thread of its own."""
    ready, url = threading.Event(), list[str]()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = make_server(checkpoint, ServeConfig(device="cpu", seed=1), None)
        url.append(await server.start())
        ready.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        assert ready.wait(60)
        yield url[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
