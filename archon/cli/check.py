"""The checks of `--dry-run`: everything that can be refused before weights are read, in the order of a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from archon.cli.config import read_bootstrap, to_yaml
from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.data.config import DatasetConfig
    from archon.data.registry import DatasetKind
    from archon.rl.config import RLConfig
    from archon.schema.config import EngineConfig, StrictModel
    from archon.training.config import BootstrapConfig, PreferenceConfig, SFTConfig

Config = TypeVar("Config", bound="StrictModel")


def print_check(config: Config, check: Callable[[Config], list[str]]) -> None:
    """Print the resolved configuration (of a run with all fields of each model) and what `check` finds, from one
    process.
    """
    main = os.environ.get("RANK", "0") == "0"
    if main:
        print(to_yaml(config, getattr(config, "resolve", lambda: None)()), flush=True)
    lines = check(config)
    if main:
        print("\n".join(f"# {line}" for line in lines))


def check_rl(config: RLConfig) -> list[str]:
    """Check an RL run; the lines say what was found. Raises the `UserError` the run itself would end with."""
    from archon.parallel.layout import parse_layout
    from archon.rl.rewards import get_reward_fn
    from archon.rl.workflows import resolve_workflow
    from archon.schema.config import EngineConfig
    from archon.training.batch_sharding import require_documents
    from archon.training.sinks import require_sinks

    check_run_dir(config.run_dir, resume=config.resume)
    require_sinks(config.metrics.sinks)
    require_documents(
        config.rollout.prompts_per_step * config.gconfig.n_samples,
        parse_layout(config.actor.layout).dp,
        "rollout.prompts_per_step * gconfig.n_samples",
    )
    models = config.resolve()
    with blank_checkpoint(read_bootstrap(config.bootstrap), config.actor.path) as made:
        steps = config.optimizer_steps
        found = check_model("actor", models.actor, made, steps)
        if models.ref is not None:
            found += check_model("ref", models.ref, made)
        if models.critic is not None:
            found += check_model("critic", models.critic, made, steps)
        if isinstance(models.teacher, EngineConfig):
            found += check_model("teacher", models.teacher, made)
        tokenizer, line = check_tokenizer(config.tokenizer or config.actor.path, made)
    found.append(line)
    for name, data in (("train_data", config.train_data), ("eval_data", config.eval_data)):
        found += check_data(name, data, "rl", tokenizer)
    reward = get_reward_fn(config.reward)
    resolve_workflow(
        config.workflow,
        config.workflow_args,
        reward_fn=reward,
        gconfig=config.gconfig,
        tokenizer=tokenizer,
        train_data=config.train_data,
    )
    return [*found, f"reward: {config.reward}", f"workflow: {config.workflow}"]


def check_preference(config: PreferenceConfig) -> list[str]:
    """Check a run on pairs of answers, as `check_rl` does."""
    found = check_sft(config, "dpo")
    ref = config.resolve().ref
    if ref is not None and ref.path != config.model.path:
        found += check_model("ref", ref, {})
    return found


def check_sft(config: SFTConfig, kind: DatasetKind = "sft") -> list[str]:
    """Check an SFT run, as `check_rl` does."""
    from archon.parallel.layout import parse_layout
    from archon.training.batch_sharding import require_documents
    from archon.training.sinks import require_sinks

    check_run_dir(config.run_dir, resume=config.resume)
    require_sinks(config.metrics.sinks)
    require_documents(config.batch_size, parse_layout(config.model.layout).dp, "batch_size")
    with blank_checkpoint(read_bootstrap(config.bootstrap), config.model.path) as made:
        found = check_model("model", config.resolve().model, made, config.optimizer_steps)
        tokenizer, line = check_tokenizer(config.tokenizer or config.model.path, made)
    found.append(line)
    for name, data in (("train_data", config.train_data), ("eval_data", config.eval_data)):
        found += check_data(name, data, kind, tokenizer, config.model.max_tokens_per_mb)
    return found


def check_bootstrap(config: BootstrapConfig) -> list[str]:
    """Check a bootstrap that is run alone, as `check_rl` checks a run."""
    from archon.rl.bootstrap import bootstrap_engine
    from archon.rl.rewards import get_reward_fn

    assert config.path is not None
    if Path(config.path).exists():
        return [f"{config.path} is there; it is left as it is where it was made with these values, and else refused"]
    steps = None if config.warmup is None else config.warmup.total_steps
    engine = bootstrap_engine(config, None, config.path)
    with blank_checkpoint(config, config.path) as made:
        found = check_model("model", engine, made, steps)
        tokenizer, line = check_tokenizer(config.path, made)
    found.append(line)
    if config.warmup is not None:
        found += check_data("warmup.train_data", config.warmup.train_data, "sft", tokenizer)
        if (target := config.warmup.target) is not None:
            found += check_data("warmup.target.eval_data", target.eval_data, "rl", tokenizer)
            get_reward_fn(target.reward)
            found.append(f"warmup.target.reward: {target.reward}")
    return found


@contextmanager
def blank_checkpoint(bootstrap: BootstrapConfig | None, path: str) -> Iterator[dict[str, str]]:
    """Yield where to read config and tokenizer of a checkpoint that a bootstrap has yet to make: {its path: a
    folder}.
    """
    if bootstrap is None or Path(path).exists():
        yield {}
        return
    from archon.rl.bootstrap import write_blank

    with tempfile.TemporaryDirectory() as folder:
        write_blank(bootstrap, Path(folder))
        yield {path: folder}


def check_run_dir(path: str | Path, *, resume: bool) -> None:
    """Refuse a run directory that could not be written or that holds another run; creates nothing."""
    from archon.training.runner import RunDirectory

    path = Path(path)
    standing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not standing.is_dir():
        raise ConfigError(f"run_dir {path}: {standing} is not a folder; choose another run_dir")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir {path}: {standing} cannot be written; choose another run_dir")
    if RunDirectory(path).has_run() and not resume:
        raise ConfigError(f"run directory {path} already holds a run; set resume=true or choose another run_dir")


def check_model(name: str, config: EngineConfig, made: Mapping[str, str], total_steps: int | None = None) -> list[str]:
    """Layout, device, attention backend, schedule (where its end is known), config and files of a model; its weights
    are not read.
    """
    import torch

    from archon.checkpoint.hf_reader import HFCheckpoint, read_hf_config
    from archon.engine.build import resolve_device
    from archon.engine.optim import check_schedule
    from archon.models.attention.registry import resolve_backend, supports_gathered
    from archon.parallel.process_group import require_processes, torchrun_world_size
    from archon.parallel.resolve import resolve_layout
    from archon.tools.planner.inspection import inspect_checkpoint

    device = resolve_device(config.device)
    resolve_backend(config.attn_type, device, getattr(torch, config.dtype))
    if config.optimizer is not None and total_steps is not None:
        check_schedule(config.scheduler, total_steps)
    found = inspect_checkpoint(config.path, read_hf_config(made.get(config.path, config.path)))
    if found.refused:
        raise ConfigError(f"{config.path}: archon refuses this checkpoint: {'; '.join(found.refused)}")
    assert found.args is not None  # as nothing was refused
    gathered = supports_gathered(config.attn_type)
    layout = resolve_layout(config, found.args.sizes, device.type, supports_gathered=gathered).layout
    if config.path not in made and not config.init_from_scratch:
        with HFCheckpoint(config.path):
            pass  # its files are checked when they are opened
    # A dry run in one process checks for all ranks; under torchrun their number must be the layout's.
    alone = torchrun_world_size() == 1
    if not alone:
        require_processes(layout.world_size)
    origin = ", to be made by the bootstrap" if config.path in made else ""
    lines = [f"{name}: {found.family}, {found.parameters:,} parameters{origin}"]
    if layout.world_size > 1:
        how = f": start the run with torchrun --nproc-per-node {layout.world_size} -m archon …" if alone else ""
        lines.append(f"{name}: layout {config.layout} on {layout.world_size} processes{how}")
    return lines


def check_tokenizer(path: str, made: Mapping[str, str]) -> tuple[Any, str]:
    """Return the tokenizer and a line that describes it."""
    from archon.checkpoint.hf_io import load_tokenizer

    tokenizer = load_tokenizer(made.get(path, path))
    return tokenizer, f"tokenizer: {len(tokenizer):,} tokens"


def check_data(
    name: str, config: DatasetConfig | None, kind: DatasetKind, tokenizer: Any, max_tokens: int | None = None
) -> list[str]:
    """Read the rows a run would train on; with `max_tokens`, each must fit a micro-batch of so many tokens."""
    from archon.data.registry import load_rows
    from archon.training.sft import require_row_lengths

    if config is None:
        return []
    rows = load_rows(config, kind, tokenizer)
    if max_tokens is not None and name == "train_data":
        require_row_lengths(rows, max_tokens)
    return [f"{name}: {len(rows):,} rows" + (f", {rows.n_filtered:,} too long" if rows.n_filtered else "")]
