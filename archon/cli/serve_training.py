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
    from archon.serve.training.ranks import RankTrainer

SETTINGS: dict[str, Any] = {
    "name": "serve-training",
    "help": "Train and sample LoRAs for clients of the Tinker SDK.\n\nIt runs until interrupted.",
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
    trainer = make_trainer(path, resolved, state)
    if trainer.is_main:
        asyncio.run(serve(trainer, path, resolved, tokens, state, host, port))
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the others
        trainer.follow()


def make_trainer(path: Path, config: ServeTrainingConfig, state: Path) -> RankTrainer:
    """Load the checkpoint into the engine of this rank."""
    from archon.engine import ArchonEngine
    from archon.schema.config import EngineConfig
    from archon.serve.training.ranks import RankTrainer

    engine = ArchonEngine(
        EngineConfig(
            path=str(path),
            layout=config.layout,
            device=config.device,
            dtype=config.dtype,
            max_tokens_per_mb=config.max_tokens_per_mb,
            optimizer=None,
            vision="off",
            compile=False,
        )
    )
    engine.initialize()
    idle, idle_bytes = state.resolve() / "idle", int(config.disk_gib * 2**30)
    return RankTrainer(engine, str(path), idle, max_resident=config.max_models, idle_bytes=idle_bytes)


def make_server(
    path: Path, config: ServeTrainingConfig, tokens: Sequence[str], state: Path, trainer: RankTrainer | None = None
) -> TrainingServer:
    """Return the server of rank 0, which does not listen yet; without a `trainer` it loads the checkpoint."""
    import torch

    from archon.checkpoint.hf_io import load_model
    from archon.checkpoint.tokenizer import load_tokenizer
    from archon.cli.serve import CPU_PREFILL_TOKENS
    from archon.serve.training import TrainingServer
    from archon.serve.training.sampler import Sampler, ServiceGenerator
    from archon.serve.training.store import Store

    trainer = trainer or make_trainer(path, config, state)
    engine = trainer.engine
    # The engine has no LoRA yet, so the generator shares its weights. On several ranks it needs whole ones of its own.
    model = engine.model
    if engine.parallel_dims.world_size > 1:
        model = load_model(path, device=str(engine.device), dtype=getattr(torch, config.dtype))
    generator = ServiceGenerator.from_model(
        model,
        load_tokenizer(config.tokenizer or path, path),
        max_slots=config.max_slots,
        seed=config.seed,
        **({"prefill_tokens": CPU_PREFILL_TOKENS} if engine.device.type == "cpu" else {}),
    )
    generator.max_loras = config.max_loras
    store = Store(state)  # no other server has the folder
    trainer.delete_idle_files()
    return TrainingServer(
        trainer,
        Sampler(generator, trainer.read),
        store,
        model=config.model_name or str(path),
        tokenizer=str(config.tokenizer or path),
        tokens=tokens,
        disk_bytes=int(config.disk_gib * 2**30),
    )


async def serve(
    trainer: RankTrainer,
    path: Path,
    config: ServeTrainingConfig,
    tokens: Sequence[str],
    state: Path,
    host: str,
    port: int,
) -> None:
    """Serve until SIGINT or SIGTERM, or until a rank is lost, which raises its error."""
    from archon.serve.preparation import skip_loaded_objects

    server = make_server(path, config, tokens, state, trainer)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(error: BaseException) -> None:
        loop.call_soon_threadsafe(stop.set)

    trainer.on_lost = end
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    url = await server.serve(host, port)
    skip_loaded_objects()
    try:
        print(f"training {server.model} at {url} (Ctrl-C to stop)", flush=True)
        await stop.wait()
    finally:
        await server.end()
    if trainer.lost is not None:
        raise trainer.lost
