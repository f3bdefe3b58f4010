"""A log line for each request of a server."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class RequestLog:
    """Logs method, path, status, tokens of prompts and answers, and milliseconds of each request, once it is answered.

    A request without a status was given up by its client.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request and log it."""
        started, status = time.perf_counter(), "-"

        async def send_and_keep_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_keep_status)
        finally:
            prompt, answer = scope["state"].get("token_counts", ("-", "-"))
            milliseconds = (time.perf_counter() - started) * 1000
            logger.info(
                "%s %s %s prompt_tokens=%s completion_tokens=%s %.0f ms",
                *(scope["method"], scope["path"], status, prompt, answer, milliseconds),
            )
