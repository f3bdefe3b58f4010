"""The state of one server: its model, who has access, and the limits of a request."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from archon.data.images import ImageReader
from archon.generation.lora import ServedLoRA
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.schema.errors import ConfigError
from archon.schema.listening import require_address

try:
    from fastapi import HTTPException
except ImportError:
    raise ConfigError(
        "serving needs the package fastapi, which is not installed; "
        "install archon's extra `rl`: pip install 'archon-engine[rl]'"
    ) from None
from archon.serve.answer_text import AnswerFormat
from archon.serve.constraints import GrammarCompiler
from archon.serve.lora_folders import LoRAFolders
from archon.serve.preparation import Preparation
from archon.serve.prompts import PromptReader
from archon.serve.pushed_weights import PushedWeights
from archon.serve.sessions import Caller, LimitError, ModelChoice, Session, Sessions, Training


@dataclass(frozen=True)
class Limits:
    """Limits of a server; a request above them gets status 413 (body), 400 (headers), 408 (time), 429 or 503.

    The limits on the content of a request are in `request_limits`.
    """

    body_bytes: int = 8 << 20
    total_body_bytes: int = 64 << 20  # bodies of all requests in progress
    connections: int = 768  # below the usual limit of 1,024 open files
    header_bytes: int = 8190  # of one header
    headers: int = 64
    sessions: int = 1024
    calls_per_session: int = 1000
    requests: int = 256  # answered concurrently
    session_idle_seconds: float = 3600.0  # a session unused for this long is closed
    request_seconds: float = 60.0  # for the headers, else the connection is closed; then again for the body


class Service:
    """State shared by all requests.

    A request with a session's key is answered by that session's generator and recorded in it. A request with the server
    token, or with any other key if there is no token, is answered by `engine` and not recorded.

    With LoRAs, or the ability to load them, the server selects the model by the name in a request. Otherwise its single
    model answers to any name.

    Args:
        tokenizer: renders prompts and decodes answers.
        engine: answers requests without a session, and sessions opened over HTTP; None serves sessions only.
        gconfig: default sampling values.
        model: name of the model for clients.
        token: bearer token with full access; None needs no token, which is allowed only on loopback.
        limits: limits of a request and of the server.
        tool_call_parser: name of the tool-call format; None: derived from the chat template.
        training: takes rated sessions; None keeps them for `export`.
        reader: image reader; None for a text model.
        log_requests: whether to log a line for each request.
        lora_folders: directories of LoRAs that the server token may load at runtime; None: none.
        pushed: weights of the engine, if the server token may push weights.
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
        tool_call_parser: str | None = None,
        training: Training | None = None,
        lora_folders: LoRAFolders | None = None,
        pushed: PushedWeights | None = None,
        reader: ImageReader | None = None,
        log_requests: bool = False,
    ) -> None:
        if lora_folders is not None and token is None:
            raise ConfigError("loading LoRAs needs a server token: set one with --token")
        if pushed is not None and token is None:
            raise ConfigError("weight pushes need a server token: set one with --token")
        self.tokenizer, self.model, self.limits = tokenizer, model, limits or Limits()
        self.training, self.pushed, self.reader = training, pushed, reader
        self.log_requests = log_requests
        self.format = AnswerFormat.of(tokenizer, tool_call_parser)
        self.grammars = GrammarCompiler(tokenizer)
        self.sessions = Sessions(self.limits.sessions, self.limits.calls_per_session, self.limits.session_idle_seconds)
        self._default = None if engine is None else Caller(engine, gconfig or GenerationHyperparameters())
        self._token = token
        self._engine, self._lora_folders = engine, lora_folders
        self._has_models = lora_folders is not None or bool(self.loras)
        self._loading = asyncio.Lock()
        self._active_requests = 0
        self._body_bytes = 0  # of all requests in progress
        self.preparation = Preparation()
        self.prompts = PromptReader(tokenizer, reader, getattr(engine, "max_seq_len", None))

    def authorize(self, key: str, host: str, origin: str | None) -> Caller | None:
        """Return the session of `key`, else the caller without a session (None: there is no engine).

        Args:
            key: bearer token or API key of the request, or empty.
            host: Host header.
            origin: Origin header, sent by browsers.

        Raises:
            HTTPException: access is denied.
        """
        session = self.sessions.find_by_key(key)
        if session is not None:
            return session
        if self._token is None:
            require_local(host, origin)
        elif not hmac.compare_digest(key.encode("utf-8", "replace"), self._token.encode()):
            raise HTTPException(401, "the API key is neither a session's nor the server's token")
        return self._default

    @property
    def active_requests(self) -> int:
        """The number of requests that are being answered."""
        return self._active_requests

    @property
    def engine(self) -> InferenceEngine | None:
        """Generator of requests without a session."""
        return self._engine

    @property
    def loras(self) -> Mapping[str, ServedLoRA]:
        """Loaded LoRAs by name."""
        return getattr(self._engine, "loras", {})

    def choose(self, model: str) -> ModelChoice:
        """Return the LoRA that answers a request for `model`, or None for the base model.

        Raises:
            HTTPException: no such model.
        """
        if model in self.loras:
            return ModelChoice(model, model)
        if self._has_models and model not in ("", self.model):
            names = ", ".join(map(repr, [self.model, *self.loras]))
            raise HTTPException(404, f"no model {model!r:.80}; the models here are {names}")
        return ModelChoice(self.model)

    async def load_lora(self, name: str, path: str, *, in_place: bool) -> None:
        """Load a LoRA under a name, or replace the LoRA of this name with `in_place`.

        Raises:
            HTTPException, UserError: the request was refused; nothing has changed.
        """
        if self._lora_folders is None:
            raise HTTPException(403, "this server cannot load LoRAs; start it with --lora-root and --token")
        if name == self.model or not name.isprintable():
            raise HTTPException(400, f"lora_name: {name!r:.80} is the base model's name, or has unprintable characters")
        async with self._loading:
            if name in self.loras and not in_place:
                raise HTTPException(400, f"LoRA {name!r:.80} is already loaded; unload it, or set load_inplace")
            loras = await asyncio.to_thread(self._lora_folders.load, path)
            engine: Any = self._engine
            if name in self.loras:
                engine.update_lora(name, loras)
            else:
                engine.load_lora(name, loras)

    async def unload_lora(self, name: str) -> None:
        """Hide a LoRA from new requests; answers in progress finish with it.

        Raises errors as `load_lora` does.
        """
        if self._lora_folders is None:
            raise HTTPException(403, "this server cannot unload LoRAs; start it with --lora-root and --token")
        engine: Any = self._engine
        async with self._loading:
            engine.unload_lora(name)

    def finish(self, session: Session) -> None:
        """Close a rated session and pass it to the trainer, if there is one."""
        self.sessions.close(session)
        if self.training is not None:
            self.training.finish(session)

    def reserve(self, size: int) -> None:
        """Count bytes of a request's body; a negative size releases them. Raises `LimitError` if there are too many."""
        limit = max(self.limits.total_body_bytes, self.limits.body_bytes)
        if size > 0 and self._body_bytes + size > limit:
            raise LimitError(
                f"the requests in progress have {self._body_bytes:,} bytes, and the server holds at most {limit:,}; "
                "try again"
            )
        self._body_bytes += size

    @contextmanager
    def count_request(self, caller: Caller) -> Iterator[None]:
        """Count a request while it is answered; raises `LimitError` if there are too many."""
        if self._active_requests >= self.limits.requests:
            raise LimitError(f"{self._active_requests} requests are in progress, the maximum; try again")
        self._active_requests += 1
        try:
            with self.sessions.in_use(caller) if isinstance(caller, Session) else nullcontext():
                yield
        finally:
            self._active_requests -= 1


def require_local(host: str, origin: str | None) -> None:
    """Raise HTTPException unless the Host and Origin headers are of this machine.

    Blocks pages of other sites, and sites with names that resolve to loopback (DNS rebinding).
    """
    hosts = [_parse_host(f"//{host}"), "localhost" if origin is None else _parse_host(origin)]
    if not all(map(is_loopback, hosts)):
        raise HTTPException(403, "without a token only 127.0.0.1 and localhost are served, and no page of another host")


def _parse_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def check_address(host: str, port: int, token: str | None) -> None:
    """Raise `ConfigError` if `check_host` does, or if the server could not listen there."""
    check_host(host, token)
    require_address(host.removeprefix("[").removesuffix("]"), port)


def check_host(host: str, token: str | None) -> None:
    """Raise `ConfigError` if other machines could send requests without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} is reached from other machines, so the server needs a token: set one with --token, or "
            "listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
