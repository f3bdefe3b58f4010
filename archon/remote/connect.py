"""Connect to inference servers: detect their kind, and refuse servers unsuitable for training."""

from __future__ import annotations

import fcntl
import ipaddress
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from archon.checkpoint.chat_template import stop_token_ids
from archon.parallel.control_plane import ControlPlane
from archon.remote.config import PushConfig
from archon.remote.dialects.archon import Archon
from archon.remote.dialects.base import BROADCAST_TRANSPORTS, Dialect, Transport
from archon.remote.dialects.sglang import SGLang
from archon.remote.dialects.vllm import VLLM
from archon.remote.engine import RemoteEngine, spaced_token_ids
from archon.remote.http import Http, ServerError
from archon.remote.server import RemoteServer
from archon.remote.versions import WireVersions, new_trainer
from archon.schema.errors import ConfigError
from archon.schema.private_directory import PrivateDirectory
from archon.schema.urls import require_http_url

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
    colocated: bool = False,
    log: Callable[[str], None] = print,
    **options: Any,
) -> RemoteEngine:
    """Return the engine of the servers at `urls`, a collective. It needs a weight push before its first request.

    Args:
        urls: the URL of each server, once.
        config: pushes and time-outs; None: the defaults.
        vocab_size: vocabulary size of the trained model.
        tokenizer: the trainer's tokenizer, compared with the servers' tokenizers; None: not compared.
        has_lora: the trained model has a LoRA, which can be pushed without the frozen weights.
        colocated: the servers share the trainer's GPU and must be able to sleep.
        log: called with each message for the user.
        options: other fields of `RemoteEngine`.

    Raises:
        ConfigError: a server is unreachable, of an unknown kind or release, cannot receive pushes, has another
            tokenizer, or does not generate a token.
    """
    config = config or PushConfig()
    if not urls or len(set(urls)) < len(urls):
        raise ConfigError(f"rollout.servers is {list(urls)}; expected the URL of each server once")
    transport: Transport = config.transport if config.transport != "auto" else "lora" if has_lora else "disk"
    if transport == "lora" and not has_lora:
        raise ConfigError("rollout.push.transport is lora, but the actor has no LoRA; set actor.lora, or disk")
    if transport == "nccl" and not torch.cuda.is_available():
        raise ConfigError("rollout.push.transport is nccl, but this trainer has no GPU; set gloo, or disk")

    world = ControlPlane.with_long_timeout("pushes")
    versions = WireVersions(world.broadcast_json(new_trainer))

    def connect_server(url: str) -> RemoteServer:
        server = _connect_server(url, versions, tokenizer, log)
        dialect = server.dialect
        if transport not in dialect.facts.transports:
            fix = dialect.start_for(transport)
            raise ConfigError(f"{url} does not accept pushes by {transport}; start it with {fix}")
        if colocated and not dialect.facts.can_sleep:
            raise ConfigError(
                f"{url}: {dialect.facts.kind} {dialect.facts.release} shares the trainer's GPU but runs without sleep "
                "mode; start vLLM with --enable-sleep-mode, or set rollout.launch.gpu_share to null"
            )
        return server

    servers = [connect_server(url) for url in urls]
    folder, close = (Path(), None) if transport in BROADCAST_TRANSPORTS else _folder(config, urls, world.is_main)
    engine = RemoteEngine(
        servers,
        config,
        transport,
        folder,
        vocab_size,
        eos_token_ids=stop_token_ids(tokenizer),
        log=log,
        colocated=colocated,
        connect_server=connect_server,
        **options,
    )
    if close is not None:
        engine.close = close
    return engine


def _connect_server(url: str, versions: WireVersions, tokenizer: Any, log: Callable[[str], None]) -> RemoteServer:
    http = Http(require_http_url(url, "rollout.servers"))
    try:
        dialect = next((match for kind in DIALECTS if (match := kind.connect(http)) is not None), None)
        if dialect is None:
            raise ConfigError(f"{url} is not a known kind of server; expected vLLM, SGLang or archon serve")
        server = RemoteServer(http, dialect, dialect.facts.model, versions)
        if warning := dialect.unverified:
            log(f"{url}: {warning}")
        dialect.resume(http)  # a crashed trainer may have left the server paused
        server.check_health(60)
        if tokenizer is not None:
            _require_tokenizer(server, tokenizer)
    except ServerError as error:
        raise ConfigError(f"rollout.servers: {error}") from None
    return server


def _require_tokenizer(server: RemoteServer, tokenizer: Any) -> None:
    text = tokenizer.decode(spaced_token_ids(len(tokenizer), PROBE_TOKENS), skip_special_tokens=True)
    ids = server.dialect.token_ids(server.http, text)
    expected = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if ids is not None and ids != expected:
        raise ConfigError(
            f"{server.url} encodes a test text as {ids[:8]}…, but the actor's tokenizer as {expected[:8]}…; start the "
            "server with the actor's checkpoint"
        )


def _folder(config: PushConfig, urls: Sequence[str], is_main: bool) -> tuple[Path, Callable[[], None] | None]:
    """Return the folder of pushes, and what releases it. The main rank locks a configured folder."""
    if config.folder is not None:
        folder = Path(config.folder).absolute()
        return folder, _lock(folder) if is_main else None
    if not all(_is_loopback(urlsplit(url).hostname or "") for url in urls):
        raise ConfigError(
            "rollout.push.folder is null, but a server is on another machine; set a folder with the same path on the "
            "trainer and the servers"
        )
    private = PrivateDirectory("archon-pushes-", SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    return private.path, private.close


def _lock(folder: Path) -> Callable[[], None]:
    """Lock a folder of pushes, because a trainer removes all pushes but the last. Return what unlocks it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"rollout.push.folder is {folder}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"rollout.push.folder is {folder}, which another trainer uses; give each trainer its own folder"
        ) from None
    except OSError:
        pass  # a file system without locks; servers still notice the versions of two trainers
    unlock = ExitStack()
    unlock.callback(os.close, handle)
    return unlock.close


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
