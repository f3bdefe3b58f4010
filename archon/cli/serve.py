"""`archon serve PATH`: serves a checkpoint with OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archon.cli.config import config_command, load_config
from archon.cli.options import CheckpointFolder, ConfigFile, Overrides
from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.cli.serve_config import ServeConfig
    from archon.serve.server import AgentServer

SETTINGS: dict[str, Any] = {
    "name": "serve",
    "help": "Serve a checkpoint to OpenAI's and Anthropic's clients until interrupted.",
    "cls": config_command("archon.cli.serve_config:ServeConfig"),
}


def command(
    path: CheckpointFolder,
    overrides: Overrides = None,
    config: ConfigFile = None,
    host: Annotated[str, typer.Option(help="address to listen on; other than loopback needs a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="ARCHON_TOKEN", help="key that clients must send; better in the environment")
    ] = None,
) -> None:
    from archon.cli.serve_config import ServeConfig

    resolved = load_config(ServeConfig, config, overrides or [])
    if token is not None and not token.strip():
        raise ConfigError("the token is empty; give one, or leave it out on loopback")
    from archon.serve.service import check_host

    check_host(host, token)  # before a model is loaded
    asyncio.run(serve(make_server(path, resolved, token), host, port))


def make_server(path: Path, config: ServeConfig, token: str | None) -> AgentServer:
    """Loads the checkpoint. Returns its server, which does not listen yet."""
    import torch

    from archon.checkpoint.hf_io import load_model, load_tokenizer
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.engine.build import resolve_device
    from archon.generation import InProcessEngine
    from archon.generation.types import GenerationHyperparameters
    from archon.serve.server import AgentServer
    from archon.serve.service import Limits

    read_hf_config(path)  # gives a clearer error than the tokenizer's loader if this is not a checkpoint
    tokenizer = load_tokenizer(config.tokenizer or path)
    model = load_model(path, device=str(resolve_device(config.device)), dtype=getattr(torch, config.dtype))
    engine = InProcessEngine.from_model(
        model, tokenizer, max_slots=config.max_slots, max_seq_len=config.max_tokens, seed=config.seed
    )
    return AgentServer(
        tokenizer,
        engine,
        GenerationHyperparameters(max_new_tokens=config.max_new_tokens),
        model=config.model_name or path.resolve().name,
        token=token,
        limits=Limits(
            body_bytes=config.max_body_bytes,
            sessions=config.max_sessions,
            calls_per_session=config.max_calls_per_session,
            requests=config.max_requests,
            session_idle_seconds=config.session_idle_seconds,
            request_seconds=config.request_seconds,
        ),
    )


async def serve(server: AgentServer, host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    url = await server.start(host, port)
    try:
        print(f"serving {server.model} at {url} (Ctrl-C ends)", flush=True)
        await stop.wait()
    finally:
        await server.close()
