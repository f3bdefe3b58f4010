"""Inference servers of a run: configured URLs or launched servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from archon.checkpoint.hub import checkpoint_folder
from archon.engine.engine import ArchonEngine
from archon.models.lora.targets import EMBEDDING, HEAD
from archon.parallel.control_plane import ControlPlane
from archon.remote.config import PushConfig
from archon.remote.connect import connect
from archon.remote.engine import RemoteEngine, release_device_memory
from archon.remote.http import KEY
from archon.remote.launchers.base import command, ensure_server_key
from archon.remote.launchers.launch import LaunchedServers, push_root
from archon.rl.config import RLConfig
from archon.rl.weight_sync import PushedWeights, probe_tokens
from archon.schema.errors import ConfigError


def open_servers(
    config: RLConfig, engine: ArchonEngine, tokenizer: Any, rows: Sequence[dict[str, Any]], log: Callable[[str], None]
) -> RemoteEngine:
    """Connect to the run's servers and push the weights of `engine` to them. A collective.

    Closing the returned engine ends launched servers. Raises ConfigError for unsuitable servers.
    """
    world = ControlPlane.with_long_timeout("servers")
    if _is_colocated(config):
        if world.size > 1:
            raise ConfigError(
                f"rollout.launch.gpu_share shares one GPU, but the trainer has {world.size} processes; run one "
                "process, or set gpu_share to null and give the servers other GPUs"
            )
        release_device_memory()
    launched = None if config.rollout.launch is None else _launch_servers(config, engine, log)
    try:
        urls = config.rollout.servers
        if config.rollout.launch is not None:
            urls, os.environ[KEY] = world.broadcast_json(
                lambda: (launched.open() if launched else [], ensure_server_key())
            )
        generator = connect(
            urls or [],
            config.rollout.push,
            vocab_size=engine.args.vocab_size,
            tokenizer=tokenizer,
            has_lora=_pushes_lora(config, engine),
            colocated=_is_colocated(config),
            recorded_model=engine.args if config.generator and config.generator.record_experts else None,
            probe=probe_tokens(tokenizer, rows),
            seed=config.seed,
            log=log,
        )
        _chain_close(generator, launched)
        generator.update_weights(PushedWeights(engine), version=engine.version)
    except BaseException:
        if launched is not None:
            launched.close()
        raise
    if launched is not None:
        launched.watch(generator)
    pushed = generator.push_metrics
    log(
        f"{len(generator.servers)} servers have the weights of version {generator.version}: by "
        f"{generator.transport}, {pushed['push/bytes']:.0f} bytes, {pushed['push/seconds']:.1f} s, "
        f"|Δ logprob| up to {pushed['push/difference']:.1e}"
    )
    return generator


def _pushes_lora(config: RLConfig, engine: ArchonEngine) -> bool:
    """Return whether servers can load the trained LoRA; others get merged weights."""
    part = "DoRA" if any(size.dora for size in engine.lora.values()) else ""
    part = "LoRA of embedding or head" if engine.lora.keys() & {EMBEDDING, HEAD} else part
    part = "modules_to_save" if engine.built.builder.saved_modules else part
    if part and config.rollout.push is not None and config.rollout.push.transport == "lora":
        raise ConfigError(
            f"rollout.push.transport is lora, and servers cannot load the {part} of actor.lora; set it to disk, which "
            "pushes merged weights"
        )
    return bool(engine.lora) and not part


def _is_colocated(config: RLConfig) -> bool:
    return config.rollout.launch is not None and config.rollout.launch.gpu_share is not None


def _chain_close(generator: RemoteEngine, launched: LaunchedServers | None) -> None:
    """Make closing the engine first end launched servers, which read its folder."""
    if launched is None:
        return
    remove = generator.close

    def close() -> None:
        launched.close()
        remove()

    generator.close = close


def _launch_servers(config: RLConfig, engine: ArchonEngine, log: Callable[[str], None]) -> LaunchedServers | None:
    """Return the servers to launch on rank 0, None on other ranks. A collective."""
    launch, push = config.rollout.launch, config.rollout.push or PushConfig()
    assert launch is not None
    ensure_server_key()
    root, model = push_root(push), checkpoint_folder(config.actor.path)
    folder = Path(config.run_dir).absolute() / "servers"
    if launch.launcher != "local":
        folder = root / "servers"
    if config.actor.init_from_scratch:  # the path holds no weights
        model = folder / "model"
        engine.save(model, tokenizer=config.tokenizer)
    if not ControlPlane.with_long_timeout("servers").is_main:
        return None
    rank = config.actor.lora.rank if config.actor.lora is not None and _pushes_lora(config, engine) else None
    return LaunchedServers(launch, command(launch, str(model.absolute()), root, config.actor.dtype, rank), folder, log)
