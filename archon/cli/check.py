"""What `--dry-run` checks: everything that can be refused before weights are read, in the order a run would meet it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.rl.config import BootstrapConfig, DatasetConfig, RLConfig, SFTConfig
    from archon.schema.config import EngineConfig


def check_rl(config: RLConfig) -> list[str]:
    """Check an RL run; the lines say what was found. Raises the `UserError` the run itself would end with."""
    from archon.rl.rewards import get_reward_fn
    from archon.rl.workflows import resolve_workflow

    check_run_dir(config.run_dir, resume=config.resume)
    found = check_model("actor", config.actor, config.bootstrap)
    if config.ref is not None:
        found += check_model("ref", config.ref, config.bootstrap)
    tokenizer, lines = check_tokenizer(config.tokenizer or config.actor.path, config.bootstrap)
    found += lines
    for name, data in (("train_data", config.train_data), ("eval_data", config.eval_data)):
        found += check_data(name, data, "rl", tokenizer)
    reward = get_reward_fn(config.reward)
    resolve_workflow(config.workflow, reward_fn=reward, gconfig=config.gconfig, tokenizer=tokenizer)
    return [*found, f"reward: {config.reward}", f"workflow: {config.workflow}"]


def check_sft(config: SFTConfig) -> list[str]:
    """Check an SFT run, as `check_rl` does."""
    check_run_dir(config.run_dir, resume=config.resume)
    found = check_model("model", config.model, config.bootstrap)
    tokenizer, lines = check_tokenizer(config.tokenizer or config.model.path, config.bootstrap)
    found += lines
    for name, data in (("train_data", config.train_data), ("eval_data", config.eval_data)):
        found += check_data(name, data, "sft", tokenizer)
    return found


def check_run_dir(path: str | Path, *, resume: bool) -> None:
    """Refuse a run directory that could not be written or that holds another run; creates nothing."""
    from archon.runner import RunDirectory

    path = Path(path)
    standing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not standing.is_dir():
        raise ConfigError(f"run_dir {path}: {standing} is not a folder; choose another run_dir")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir {path}: {standing} cannot be written; choose another run_dir")
    if RunDirectory(path).holds_a_run() and not resume:
        raise ConfigError(f"run directory {path} already holds a run; set resume=true or choose another run_dir")


def check_model(name: str, config: EngineConfig, bootstrap: BootstrapConfig | None) -> list[str]:
    """Layout, device and config of a model; its weights are not read."""
    from archon.engine import resolve_device
    from archon.hf_io import read_hf_config
    from archon.inspect import inspect_checkpoint
    from archon.parallel.layout import parse_layout

    parse_layout(config.layout).dims(resolve_device(config.device).type).require_implemented()
    if bootstrap is not None and not Path(config.path).exists():
        return [f"{name}: {config.path} does not exist; the bootstrap will make it"]
    found = inspect_checkpoint(config.path, read_hf_config(config.path))
    if found.refused:
        raise ConfigError(f"{config.path}: archon refuses this checkpoint: {'; '.join(found.refused)}")
    return [f"{name}: {found.family}, {found.parameters:,} parameters"]


def check_tokenizer(path: str, bootstrap: BootstrapConfig | None) -> tuple[Any, list[str]]:
    """The tokenizer, or None where a bootstrap will make it."""
    from archon.hf_io import load_tokenizer

    if bootstrap is not None and not Path(path).exists():
        return None, ["tokenizer: the bootstrap will make it"]
    tokenizer = load_tokenizer(path)
    return tokenizer, [f"tokenizer: {len(tokenizer):,} tokens"]


def check_data(name: str, config: DatasetConfig | None, kind: Literal["rl", "sft"], tokenizer: Any) -> list[str]:
    """Read the rows a run would train on."""
    from archon.rl.data import load_rows

    if config is None:
        return []
    if tokenizer is None and (kind == "sft" or config.max_length is not None):
        return [f"{name}: {config.path}, not read: its rows need the tokenizer that the bootstrap will make"]
    rows = load_rows(config, kind, tokenizer)
    return [f"{name}: {len(rows):,} rows" + (f", {rows.n_filtered:,} too long" if rows.n_filtered else "")]
