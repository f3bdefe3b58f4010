"""`archon serve PATH`: serve a checkpoint over the OpenAI and Anthropic protocols."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from archon.cli.config import config_command, load_config
from archon.cli.options import CheckpointFolder, ConfigFile, Overrides
from archon.schema.config import expand_path
from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.checkpoint.peft.export import LoRAWeights
    from archon.cli.serve_config import ServeConfig
    from archon.models.base import BaseArchonModel
    from archon.serve.server import AgentServer

CPU_PREFILL_TOKENS = 512
"""Prompt tokens of one step on a CPU, which answers nothing else meanwhile, not even `/health`."""

SETTINGS: dict[str, Any] = {
    "name": "serve",
    "help": "Serve a checkpoint to OpenAI and Anthropic clients.\n\nIt runs until interrupted.",
    "cls": config_command("archon.cli.serve_config:ServeConfig"),
}


def command(
    path: CheckpointFolder,
    overrides: Overrides = None,
    config: ConfigFile = None,
    host: Annotated[str, typer.Option(help="address to listen on; any but loopback requires a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 picks a free one")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="ARCHON_TOKEN", help="API key for clients; prefer the environment variable")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="LoRA, a folder or hub id, to serve as model NAME; repeatable"),
    ] = None,
    lora_root: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="folder from which authorized clients may load LoRAs; requires a token"),
    ] = None,
    push_root: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="folder from which an authorized trainer may push weights; requires a token"
        ),
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(metavar="RUN.yaml", help="`archon rl` config: train on sessions that clients rate"),
    ] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="log a line for each request: status, tokens and milliseconds")
    ] = False,
) -> None:
    """Serve a checkpoint until interrupted."""
    from archon.cli.serve_config import ServeConfig

    if (train is not None or push_root is not None) and (lora or lora_root):
        raise ConfigError(
            "--lora and --lora-root require fixed base weights, but --train and --push-root change them; remove one of "
            "them"
        )
    if train is not None and push_root is not None:
        raise ConfigError("--train and --push-root exclude each other: both change the weights; remove one of them")
    if train is not None and log_requests:
        raise ConfigError("--log-requests logs no requests of --train; remove one of them")
    if train is not None:
        serve_training(path, train, overrides or [], host, port, token)
    resolved = load_config(ServeConfig, config, overrides or [])
    if token is not None and not token.strip():
        raise ConfigError("the token is empty; set one, or remove it on loopback")
    from archon.serve.service import check_address

    check_address(host, port, token)  # before a model is loaded
    if lora_root is not None and token is None:
        raise ConfigError("--lora-root lets clients load LoRAs and requires a token; set one with --token")
    if lora_root is not None and not lora_root.is_dir():
        raise ConfigError(f"--lora-root {str(lora_root)!r} is not a folder")
    if push_root is not None and token is None:
        raise ConfigError("--push-root lets trainers replace the weights and requires a token; set one with --token")
    if push_root is not None and not push_root.is_dir():
        raise ConfigError(f"--push-root {str(push_root)!r} is not a folder")
    if log_requests:
        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger("archon.serve.request_log").setLevel(logging.INFO)
    folders = parse_lora_folders(lora or [])
    server = make_server(path, resolved, token, folders, lora_root, push_root, log_requests)
    asyncio.run(serve(server, host, port))


def parse_lora_folders(options: Sequence[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER options. Raises ConfigError if one is malformed or repeated."""
    folders: dict[str, Path] = {}
    for option in options:
        name, separator, folder = option.partition("=")
        if not (name and separator and folder) or not name.isprintable():
            raise ConfigError(f"--lora {option!r}; expected NAME=FOLDER")
        if name in folders:
            raise ConfigError(f"--lora has the name {name!r} twice; use unique names")
        folders[name] = Path(expand_path(folder))
    return folders


def serve_training(path: Path, train: Path, overrides: list[str], host: str, port: int, token: str | None) -> NoReturn:
    """Run `archon rl` on client sessions, starting from the checkpoint `path`, and exit with its code."""
    from archon.cli.train import exit_with, run_training
    from archon.serve.service import check_address

    check_address(host, port, token)
    if token is not None:
        os.environ["ARCHON_TOKEN"] = token  # an override would write it to the run directory
    online = [
        f"actor.path={path}",
        "workflow=archon.rl.OnlineWorkflow",
        "train_data={path: 'python:archon.rl.workflows.online.session_rows'}",
        "rollout.n_gold_checks=0",
        f"workflow_args.host={host}",
        f"workflow_args.port={port}",
    ]
    exit_with(lambda: run_training("rl", train, [*online, *overrides], dry_run=False))


def make_server(
    path: Path,
    config: ServeConfig,
    token: str | None,
    loras: Mapping[str, Path] | None = None,
    lora_root: Path | None = None,
    push_root: Path | None = None,
    log_requests: bool = False,
) -> AgentServer:
    """Load the checkpoint and its LoRAs. Returns the server, which does not listen yet."""
    import torch

    from archon.checkpoint.hf_io import load_model, require_same_model
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.checkpoint.peft.export import read_lora_weights
    from archon.checkpoint.tokenizer import has_tokenizer, load_tokenizer, saved_tokenizer
    from archon.data.image_rows import open_reader
    from archon.engine.build import resolve_device
    from archon.generation import InProcessEngine
    from archon.generation.types import GenerationHyperparameters
    from archon.models import get_model_spec
    from archon.serve.lora_folders import LoRAFolders, lora_stop_ids
    from archon.serve.pushed_weights import NO_VERSION, PushedWeights
    from archon.serve.server import AgentServer
    from archon.serve.service import Limits

    # Read the config first: its error for a folder that is not a checkpoint is clearer than the tokenizer's.
    hf_config = read_hf_config(path)
    spec, model_name = get_model_spec(hf_config["model_type"]), config.model_name or path.resolve().name
    tokenizers = {name: saved_tokenizer(folder) for name, folder in (loras or {}).items()}
    trained = next(iter(tokenizers.values())) if len(tokenizers) == 1 else None
    tokenizer = load_tokenizer(config.tokenizer or trained or path, path)
    stop_ids = {name: lora_stop_ids(folder, path, tokenizer) for name, folder in tokenizers.items()}
    device = resolve_device(config.device)
    read = partial(load_model, device=str(device), dtype=getattr(torch, config.dtype))
    engine = InProcessEngine.from_model(
        read(path),
        tokenizer,
        max_slots=config.max_slots,
        max_seq_len=config.max_tokens,
        seed=config.seed,
        **({"prefill_tokens": CPU_PREFILL_TOKENS} if device.type == "cpu" else {}),
        version=0 if push_root is None else NO_VERSION,
    )
    names = spec.state_dict_adapter_class(hf_config, str(path))
    engine.max_loras = config.max_loras
    for name, folder in (loras or {}).items():
        if name == model_name:
            raise ConfigError(f"--lora has the name of the base model, {name!r}; choose another, or set model_name")
        engine.load_lora(name, replace(read_lora_weights(folder, names, path), stop_ids=stop_ids[name]))

    def read_pushed(folder: Path) -> BaseArchonModel:
        require_same_model(folder, engine.model.args)  # before memory is allocated
        return read(folder)

    def read_lora(folder: Path) -> LoRAWeights:
        stop_ids = lora_stop_ids(folder if has_tokenizer(folder) else None, path, tokenizer)
        return replace(read_lora_weights(folder, names), stop_ids=stop_ids)

    return AgentServer(
        tokenizer,
        engine,
        GenerationHyperparameters(max_new_tokens=config.max_new_tokens),
        model=model_name,
        token=token,
        tool_call_parser=config.tool_call_parser,
        reader=open_reader(path),
        log_requests=log_requests,
        lora_folders=None if lora_root is None else LoRAFolders(lora_root, read_lora),
        pushed=(
            None
            if push_root is None
            else PushedWeights(engine, push_root, read_pushed, lambda folder: read_lora_weights(folder, names))
        ),
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
    """Serve until SIGINT or SIGTERM."""
    from archon.serve.preparation import skip_loaded_objects

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    url = await server.start(host, port)
    skip_loaded_objects()
    try:
        print(f"serving {server.model} at {url} (Ctrl-C to stop)", flush=True)
        await stop.wait()
    finally:
        await server.close()
