"""`archon serve-training PATH`: train LoRAs for clients of the Tinker SDK."""

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
    from collections.abc import Sequence

    from archon.cli.serve_training_config import ServeTrainingConfig
    from archon.serve.training import TrainingServer

CPU_PREFILL_TOKENS = 512
"""Prompt tokens of one sampling step on a CPU, which it shares with training."""

SETTINGS: dict[str, Any] = {
    "name": "serve-training",
    "help": "Train and sample LoRAs of a checkpoint for clients of the Tinker SDK until interrupted.",
    "cls": config_command("archon.cli.serve_training_config:ServeTrainingConfig"),
}


def command(
    path: CheckpointFolder,
    overrides: Overrides = None,
    config: ConfigFile = None,
    host: Annotated[str, typer.Option(help="address to listen on; any but loopback requires a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 picks a free one")] = 8000,
    token: Annotated[
        list[str] | None,
        typer.Option(
            envvar="ARCHON_TOKEN",
            help="API key of a client, tml-…; repeatable, or separated by spaces in the environment variable",
        ),
    ] = None,
    state: Annotated[
        Path, typer.Option(metavar="FOLDER", help="folder of checkpoints, sessions and results; kept over restarts")
    ] = Path("serve-training"),
) -> None:
    """Serve until interrupted."""
    from archon.cli.serve_training_config import ServeTrainingConfig

    resolved = load_config(ServeTrainingConfig, config, overrides or [])
    tokens = token or []
    for text in tokens:
        if not text.startswith("tml-"):
            raise ConfigError("a --token does not start with tml-, and the SDK sends only API keys that do")
    from archon.serve.service import check_address

    check_address(host, port, tokens[0] if tokens else None)  # before a model is loaded
    asyncio.run(serve(path, resolved, tokens, state, host, port))


def make_server(path: Path, config: ServeTrainingConfig, tokens: Sequence[str], state: Path) -> TrainingServer:
    """Load the checkpoint. Returns the server, which does not listen yet."""
    import torch

    from archon.checkpoint.tokenizer import load_tokenizer
    from archon.engine import ArchonEngine
    from archon.schema.config import EngineConfig
    from archon.serve.training import TrainingServer
    from archon.serve.training.sampler import Sampler, ServiceGenerator
    from archon.serve.training.store import Store
    from archon.serve.training.trainer import Trainer

    engine = ArchonEngine(
        EngineConfig(
            path=str(path),
            device=config.device,
            dtype=config.dtype,
            max_tokens_per_mb=config.max_tokens_per_mb,
            optimizer=None,
            vision="off",
            compile=False,
        )
    )
    tokenizer = load_tokenizer(config.tokenizer or path, path)
    engine.initialize()
    # Before the first LoRA, so that the generator has the base's weights only, and shares them.
    generator = ServiceGenerator.from_model(
        engine.full_model,
        tokenizer,
        max_slots=config.max_slots,
        seed=config.seed,
        **({"prefill_tokens": CPU_PREFILL_TOKENS} if engine.device == torch.device("cpu") else {}),
    )
    generator.max_loras = config.max_loras
    trainer = Trainer(engine, str(path))
    return TrainingServer(
        trainer,
        Sampler(generator, trainer.read),
        Store(state),
        model=config.model_name or str(path),
        tokenizer=str(config.tokenizer or path),
        tokens=tokens,
        max_models=config.max_models,
        disk_bytes=int(config.disk_gib * 2**30),
    )


async def serve(
    path: Path, config: ServeTrainingConfig, tokens: Sequence[str], state: Path, host: str, port: int
) -> None:
    """Serve until SIGINT or SIGTERM."""
    server = make_server(path, config, tokens, state)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    url = await server.serve(host, port)
    try:
        print(f"training {server.model} at {url} (Ctrl-C to stop)", flush=True)
        await stop.wait()
    finally:
        await server.end()
