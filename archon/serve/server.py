"""The HTTP server that agents speak to: OpenAI's and Anthropic's endpoints over a generator, and sessions."""

from __future__ import annotations

import asyncio
import errno

from uvicorn.server import ServerState

from archon.schema.errors import ConfigError
from archon.serve.connection import Connection, configured
from archon.serve.routes import app
from archon.serve.service import Limits, Service, check_host

__all__ = ["AgentServer", "Limits", "check_host"]


class AgentServer(Service):
    """Serves on one event loop, whose signals stay its owner's; start it, and close it, there. Arguments are those of
    `Service`."""

    port: int
    _listening: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen. Returns the base URL, which ends in /v1; port 0 takes a free one.

        Raises `ConfigError` for a host beyond loopback without a token, and for a port in use.
        """
        check_host(host, self._token)
        config, self._state = configured(app), ServerState()
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(lambda: Connection(config, self._state, self), host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(f"port {port} on {host} is in use; choose another, or 0 for any that is free") from None
        self.port = self._listening.sockets[0].getsockname()[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    async def close(self) -> None:
        """Stop listening and break off every connection; what is being answered is cancelled, and awaited."""
        if self._listening is None:
            return
        self._listening.close()
        self._listening = None
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
