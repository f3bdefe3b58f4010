"""The HTTP server that agents speak to: OpenAI's and Anthropic's endpoints over a generator, and sessions."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.schema.errors import ConfigError
from archon.serve.answering import Choice, answer
from archon.serve.anthropic_api import CountBody
from archon.serve.body import Api, event_bytes
from archon.serve.http_errors import HTTPError, JSONRequestHandler, error_body, http_error, web
from archon.serve.openapi import OPERATIONS, ExportQuery, RewardBody, describe
from archon.serve.reading import load_json
from archon.serve.sessions import Asker, ExportStyle, Session, Sessions

logger = logging.getLogger(__name__)

Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


@dataclass(frozen=True)
class Limits:
    """What one server takes; beyond it a request gets status 413 (body), 400 (headers), 408 (time) or 429."""

    body_bytes: int = 8 << 20
    header_bytes: int = 8190  # of one header
    headers: int = 64
    sessions: int = 1024
    calls_per_session: int = 1000
    requests: int = 256  # being answered at a time
    session_idle_seconds: float = 3600.0  # a session that nobody has used for so long is closed
    request_seconds: float = 60.0  # for the headers to come in, else the connection is closed; then for the body


class AgentServer:
    """Serves one event loop; start it, and close it, there.

    A request with the key of a session is answered by that session's generator and recorded in it. One with the
    server's token, or with any other key where it has none, is answered by `engine` and not recorded.

    Args:
        tokenizer: renders prompts and decodes answers.
        engine: answers requests of no session, and of sessions that are opened over HTTP; None serves sessions alone.
        gconfig: sampling values that a request leaves open.
        model: name that the model goes by.
        token: the bearer token of those who may do everything; None asks for none, which only loopback may.
        limits: what is taken.
    """

    def __init__(
        self,
        tokenizer: Any,
        engine: InferenceEngine | None = None,
        gconfig: GenerationHyperparameters | None = None,
        *,
        model: str = "archon",
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.tokenizer, self.model, self.limits = tokenizer, model, limits or Limits()
        self.sessions = Sessions(self.limits.sessions, self.limits.calls_per_session, self.limits.session_idle_seconds)
        self._anyone = None if engine is None else Asker(engine, gconfig or GenerationHyperparameters())
        self._token = token
        self._answering = 0
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and give back the base URL, which ends in /v1; port 0 takes a free one.

        Raises `ConfigError` for a host beyond loopback without a token, and for a port in use.
        """
        check_host(host, self._token)
        limits = self.limits
        app = web.Application(middlewares=[self._errors_as_json], client_max_size=limits.body_bytes)
        app.add_routes(self._routes())
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        loop, manager = asyncio.get_running_loop(), self._runner.server
        assert manager is not None

        def connection() -> asyncio.Protocol:
            return JSONRequestHandler(
                manager,
                loop=loop,
                header_seconds=limits.request_seconds,
                access_log=None,
                max_line_size=limits.header_bytes,
                max_field_size=limits.header_bytes,
                max_headers=limits.headers,
            )

        try:
            self._listening = await loop.create_server(connection, host, port)
        except OSError as error:
            await self.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(f"port {port} on {host} is in use; choose another, or 0 for any that is free") from None
        self.port = self._listening.sockets[0].getsockname()[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    async def close(self) -> None:
        """Stop listening, and end what is being answered."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _routes(self) -> list[web.RouteDef]:
        handlers: dict[str, Handler] = {
            "count_tokens": self._count_tokens,
            "models": self._models,
            "model": self._models,
            "open_session": self._open,
            "reward": self._reward,
            "export": self._export,
            "close_session": self._close_session,
            "health": self._health,
            "openapi": self._openapi,
        }
        return [
            web.route(
                operation.method,
                operation.path,
                handlers[operation.name] if operation.api is None else self._generates(operation.api),
            )
            for operation in OPERATIONS
        ]

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:  # the client has gone
            raise
        except Exception as error:
            failure = http_error(error)
            if failure.status == 500:
                logger.exception("request to %s failed", request.path)
            return web.json_response(error_body(failure, request.path), status=failure.status, headers=failure.headers)

    def _asker(self, request: web.Request) -> Asker | None:
        """Who asks: a session by its key, else whoever may do everything. Raises 401 for anyone else."""
        key = request.headers.get("x-api-key", "")
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            key = bearer.strip()
        session = self.sessions.of_key(key)
        if session is not None:
            return session
        if self._token is None:
            # Neither a page elsewhere nor one whose own name resolves to loopback may speak to the model.
            hosts = [request.url.host or "", _host_of(request.headers.get("Origin", "http://localhost"))]
            if not all(map(is_loopback, hosts)):
                raise HTTPError(
                    403, "without a token only 127.0.0.1 and localhost are served, and no page of another host"
                )
        elif not hmac.compare_digest(key.encode("utf-8", "replace"), self._token.encode()):
            raise HTTPError(401, "the API key is neither a session's nor the server's token")
        return self._anyone

    async def _json(self, request: web.Request) -> dict[str, Any]:
        """The body, which must be a JSON object."""
        if request.content_type != "application/json":  # which no page elsewhere can send without being asked first
            raise HTTPError(415, f"content type {request.content_type!r:.80}: send application/json")
        try:
            async with asyncio.timeout(self.limits.request_seconds):
                body = await request.read()
        except TimeoutError:
            raise HTTPError(408, f"the body did not come within {self.limits.request_seconds:g} s") from None
        try:
            data = load_json(body)
        except ValueError as error:
            raise HTTPError(400, f"the body is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise HTTPError(400, f"the body is a JSON {type(data).__name__}, expected an object")
        return data

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._answering >= self.limits.requests:
            raise HTTPError(429, f"{self._answering} requests are being answered, as many as may be; try again")
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    def _generates(self, api_class: type[Api]) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            asker = self._asker(request)
            if asker is None:
                raise HTTPError(401, "this server answers sessions alone; use a session's key")
            with self._one_more(), self.sessions.in_use(asker):
                api = api_class(await self._json(request), asker, self.tokenizer, self.model)
                async with aclosing(answer(asker, api.call, self.tokenizer, api.stream)) as items:
                    if api.stream:
                        return await self._stream(request, api, items)
                    choices = [item async for item in items if isinstance(item, Choice)]
                return web.json_response(api.whole(sorted(choices, key=lambda choice: choice.index)))

        return handler

    async def _stream(self, request: web.Request, api: Api, items: AsyncIterator[Any]) -> web.StreamResponse:
        """Server-sent events. What fails before the first token still has a status of its own."""
        item = await anext(items)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            choices: list[Choice] = []
            events = list(api.begin())
            while item is not None:
                if isinstance(item, Choice):
                    choices.append(item)
                    events += api.ended(item)
                else:
                    events += api.piece(item)
                if events:  # together: what sending costs does not depend on how much is sent
                    await response.write(b"".join(map(event_bytes, events)))
                    events = []
                item = await anext(items, None)
            last = api.finish(choices)
        except ConnectionError:
            raise
        except Exception as error:
            failure = http_error(error)
            if failure.status == 500:
                logger.exception("streaming to %s failed", request.path)
            last = api.failed(error_body(failure, request.path))
        await response.write(b"".join(map(event_bytes, last)))
        await response.write_eof()
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        self._asker(request)
        body = CountBody.parse(await self._json(request), source="request")
        return web.json_response({"input_tokens": len(body.prompt(self.tokenizer))})

    async def _models(self, request: web.Request) -> web.Response:
        self._asker(request)
        one = {"id": self.model, "object": "model", "created": 0, "owned_by": "archon"}
        name = request.match_info.get("model")
        if name is None:
            return web.json_response({"object": "list", "data": [one]})
        if name != self.model:
            raise HTTPError(404, f"no model {name!r:.80}; the model here is {self.model!r}")
        return web.json_response(one)

    async def _open(self, request: web.Request) -> web.Response:
        asker = self._asker(request)
        if asker is None or isinstance(asker, Session):
            raise HTTPError(403, "only the server's token opens sessions")
        session = self.sessions.open(asker.engine, asker.gconfig)
        return web.json_response({"id": session.id, "api_key": session.key}, status=201)

    def _session(self, request: web.Request) -> Session:
        """The session that the path names; it may be dealt with by its own key, and by who may do everything."""
        asker = self._asker(request)
        session = self.sessions.of_id(request.match_info["session"])
        if session is None or (isinstance(asker, Session) and asker is not session):
            raise HTTPError(404, f"no open session {request.match_info['session']!r:.80}")
        return session

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = RewardBody.parse(await self._json(request), source="request")
        session.set_reward(body.reward, body.completion_id, body.choice)
        return web.json_response({"reward": body.reward})

    async def _export(self, request: web.Request) -> web.Response:
        session = self._session(request)
        query = ExportQuery.parse(dict(request.query), source="query")
        style: ExportStyle = query.style
        rows = [
            {
                "input_ids": row.record.input_ids,
                "loss_mask": row.record.loss_mask,
                "logprobs": row.record.logprobs,
                "versions": row.record.versions,
                "turn_ids": row.record.turn_ids,
                "truncated": row.record.truncated,
                "reward": row.reward,
                "answers": [{"completion_id": completion, "choice": choice} for completion, choice in row.answers],
            }
            for row in session.export(style, query.turn_discount)
        ]
        return web.json_response({"style": style, "trajectories": rows})

    async def _close_session(self, request: web.Request) -> web.Response:
        session = self._session(request)
        self.sessions.close(session)
        return web.json_response({"id": session.id, "answers": len(session.interactions)})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response(describe(self.model, token=self._token is not None))


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def check_host(host: str, token: str | None) -> None:
    """Raise `ConfigError` where other machines could ask without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} is reached from other machines, so the server needs a token: set one with --token, or "
            "listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
