"""Connects servers: finds out what each is, and refuses what could not be trained on."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from archon.remote.config import PushConfig
from archon.remote.dialects.archon import Archon
from archon.remote.dialects.base import BROADCAST_TRANSPORTS, Dialect, Transport
from archon.remote.dialects.sglang import SGLang
from archon.remote.dialects.vllm import VLLM
from archon.remote.engine import RemoteEngine, spaced_token_ids
from archon.remote.http import Http, ServerError
from archon.remote.private_directory import PrivateDirectory
from archon.remote.server import RemoteServer
from archon.schema.errors import ConfigError

DIALECTS: tuple[type[Dialect], ...] = (VLLM, Archon, SGLang)
SHARED_MEMORY = Path("/dev/shm")
PROBE_TOKENS = 256


def connect(
    urls: Sequence[str],
    config: PushConfig | None = None,
    *,
    vocab_size: int,
    tokenizer: Any = None,
    has_lora: bool = False,
    log: Callable[[str], None] = print,
    **options: Any,
) -> RemoteEngine:
    """Return the engine of the servers at `urls`, to which weights must be pushed before it is asked.

    Args:
        vocab_size: of the model whose weights will be pushed.
        tokenizer: names the end-of-text id; must be that of the servers.
        log: called with one line of what a user must know.
        has_lora: whether the model's adapters alone may be pushed.
        options: further fields of `RemoteEngine`.

    Raises ConfigError for a server that cannot be reached, is of an unknown kind or release, cannot be pushed to, has
    another tokenizer, or does not complete a token.
    """
    config = config or PushConfig()
    if not urls or len(set(urls)) < len(urls):
        raise ConfigError(f"rollout.servers is {list(urls)}; expected the URL of each server once")
    servers = [_connect_server(url, tokenizer, log) for url in urls]
    transport: Transport = config.transport if config.transport != "auto" else "lora" if has_lora else "disk"
    if transport == "lora" and not has_lora:
        raise ConfigError("rollout.push.transport is lora, and the actor has no adapters; set actor.lora, or disk")
    if transport == "nccl" and not torch.cuda.is_available():
        raise ConfigError("rollout.push.transport is nccl, and this trainer has no GPU; set gloo, or disk")
    for server in servers:
        _require_transport(server, transport)
    folder, own = (Path(), None) if transport in BROADCAST_TRANSPORTS else _folder(config, urls)

    def connect_server(url: str) -> RemoteServer:
        server = _connect_server(url, tokenizer, log)
        _require_transport(server, transport)
        return server

    eos = getattr(tokenizer, "eos_token_id", None)
    engine = RemoteEngine(
        servers,
        config,
        transport,
        folder,
        vocab_size,
        eos_token_ids=() if eos is None else (eos,),
        log=log,
        connect_server=connect_server,
        **options,
    )
    if own is not None:
        engine.close = own.close
    return engine


def _connect_server(url: str, tokenizer: Any, log: Callable[[str], None]) -> RemoteServer:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"rollout.servers: got {url!r}; expected a URL such as http://127.0.0.1:8000")
    http = Http(url)
    try:
        dialect = next((found for kind in DIALECTS if (found := kind.connect(http)) is not None), None)
        if dialect is None:
            raise ConfigError(f"{url} is no server of a known kind; expected vLLM, SGLang or archon serve")
        server = RemoteServer(http, dialect, dialect.facts.model)
        if warning := dialect.unverified:
            log(f"{url}: {warning}")
        dialect.resume(http)  # a trainer that died may have left it paused
        server.check_health(60)
        if tokenizer is not None:
            _require_tokenizer(server, tokenizer)
    except ServerError as error:
        raise ConfigError(f"rollout.servers: {error}") from None
    return server


def _require_tokenizer(server: RemoteServer, tokenizer: Any) -> None:
    text = tokenizer.decode(spaced_token_ids(len(tokenizer), PROBE_TOKENS), skip_special_tokens=True)
    theirs = server.dialect.token_ids(server.http, text)
    ours = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if theirs is not None and theirs != ours:
        raise ConfigError(
            f"{server.url}: its tokenizer makes {theirs[:8]}… of a text of which the actor's makes {ours[:8]}…; start "
            "it with the actor's checkpoint"
        )


def _require_transport(server: RemoteServer, transport: Transport) -> None:
    facts = server.dialect.facts
    if transport in facts.transports:
        return
    fix = server.dialect.start_for(transport)
    raise ConfigError(f"{server.url} takes no weights by {transport}; start it with {fix}")


def _folder(config: PushConfig, urls: Sequence[str]) -> tuple[Path, PrivateDirectory | None]:
    if config.folder is not None:
        return Path(config.folder).absolute(), None
    if not all(_is_loopback(urlsplit(url).hostname or "") for url in urls):
        raise ConfigError(
            "rollout.push.folder is null, and a server is on another machine; name a folder that the trainer and the "
            "servers see under one path"
        )
    made = PrivateDirectory(SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    return made.path, made


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
