"""What one server holds and allows: its model, who may ask, and the limits of a request."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.schema.errors import ConfigError

try:
    from fastapi import HTTPException
except ImportError:
    raise ConfigError(
        "serving needs the package fastapi, which is not installed; "
        "install archon's extra `rl`: pip install 'archon-engine[rl]'"
    ) from None
from archon.serve.sessions import Caller, LimitError, Session, Sessions


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


class Service:
    """The state that requests share.

    A request with the key of a session is answered by that session's generator and recorded in it. One with the
    server's token, or with any other key where it has none, is answered by `engine` and not recorded.

    Args:
        tokenizer: renders prompts and decodes answers.
        engine: answers requests of no session, and of sessions that are opened over HTTP; None serves sessions alone.
        gconfig: sampling values that a request leaves open.
        model: name of the model for clients.
        token: the bearer token that allows everything; None asks for none, which only loopback may.
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
        self._default = None if engine is None else Caller(engine, gconfig or GenerationHyperparameters())
        self._token = token
        self._answering = 0

    def caller(self, key: str, host: str, origin: str | None) -> Caller | None:
        """Returns the session that `key` belongs to, else the caller without a session (None: there is no engine).

        Args:
            key: bearer token or API key of the request, empty without one.
            host: its Host header.
            origin: its Origin header, which browsers send.

        Raises `HTTPException` for anyone who may not ask.
        """
        session = self.sessions.of_key(key)
        if session is not None:
            return session
        if self._token is None:
            # Neither a page elsewhere nor one whose own name resolves to loopback may speak to the model.
            hosts = [_host_of(f"//{host}"), "localhost" if origin is None else _host_of(origin)]
            if not all(map(is_loopback, hosts)):
                raise HTTPException(
                    403, "without a token only 127.0.0.1 and localhost are served, and no page of another host"
                )
        elif not hmac.compare_digest(key.encode("utf-8", "replace"), self._token.encode()):
            raise HTTPException(401, "the API key is neither a session's nor the server's token")
        return self._default

    def session(self, caller: Caller | None, session_id: str) -> Session:
        """Returns the session of that id; `HTTPException` where there is none, or the caller is another session."""
        session = self.sessions.of_id(session_id)
        if session is None or (isinstance(caller, Session) and caller is not session):
            raise HTTPException(404, f"no open session {session_id!r:.80}")
        return session

    @contextmanager
    def answering(self, caller: Caller) -> Iterator[None]:
        """Counts a request while it is answered; `LimitError` where too many are."""
        if self._answering >= self.limits.requests:
            raise LimitError(f"{self._answering} requests are being answered, as many as may be; try again")
        self._answering += 1
        try:
            with self.sessions.in_use(caller):
                yield
        finally:
            self._answering -= 1


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def check_host(host: str, token: str | None) -> None:
    """Raises `ConfigError` where other machines could ask without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} is reached from other machines, so the server needs a token: set one with --token, or "
            "listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
