"""Checks of `--dry-run`: everything that can fail before weights are read, in the order of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from archon.cli.config import read_bootstrap, to_yaml
from archon.schema.errors import ConfigError
from archon.schema.private_directory import PrivateDirectory

if TYPE_CHECKING:
    from archon.data.config import DatasetConfig, DatasetKind
    from archon.rl.config import RLConfig
    from archon.schema.config import EngineConfig, StrictModel
    from archon.tools.planner.prediction import Batch
    from archon.training.config import BootstrapConfig, PreferenceConfig, SFTConfig

Config = TypeVar("Config", bound="StrictModel")


def print_check(config: Config, check: Callable[[Config], list[str]]) -> None:
    """Print the resolved configuration and the lines of `check` on rank 0."""
    main = os.environ.get("RANK", "0") == "0"
    if main:
        print(to_yaml(config, getattr(config, "resolve", lambda: None)()), flush=True)
    lines = check(config)
    if main:
        print("\n".join(f"# {line}" for text in lines for line in text.splitlines()))


def check_rl(config: RLConfig, gpu: str | None = None) -> list[str]:
    """Check an RL run. Returns summary lines; raises the `UserError` that would end the run.

    With `gpu`, check for this GPU in place of the local device, and predict memory and time of each trained model. The
    prediction leaves out the generator, servers, and models that are not trained.
    """
    from archon.parallel.layout import parse_layout
    from archon.rl.config import RewardModelConfig
    from archon.rl.rewards import get_reward_fn
    from archon.rl.rewards.reward_model import RewardModel
    from archon.rl.workflows import resolve_workflow
    from archon.schema.config import EngineConfig, derive_reference
    from archon.tools.planner.prediction import Batch
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
    # 1. Models and tokenizer
    with blank_checkpoint(read_bootstrap(config.bootstrap), config.actor.path) as blanks:
        steps = config.optimizer_steps
        answers = config.rollout.prompts_per_step * config.gconfig.n_samples
        max_tokens, prompt = models.actor.max_tokens_per_mb, config.train_data.max_length
        longest = max_tokens if prompt is None else min(prompt + config.gconfig.max_new_tokens, max_tokens)
        options: dict[str, Any] = {"gpu": gpu, "batch": Batch(answers, longest)}
        lines = check_model("actor", models.actor, blanks, steps, **options)
        if models.ref is not None:
            lines += check_model("ref", models.ref, blanks, **options)
        if models.critic is not None:
            lines += check_model("critic", models.critic, blanks, steps, **options)
        if isinstance(models.teacher, EngineConfig):
            lines += check_model("teacher", models.teacher, blanks, **options)
        tokenizer, line = check_tokenizer(config.tokenizer or config.actor.path, blanks)
    lines.append(line)
    # 2. Data
    for name, data in (("train_data", config.train_data), ("eval_data", config.eval_data)):
        lines += check_data(name, data, "rl", tokenizer, environments=config.environments)
    # 3. Reward and workflow
    offered: dict[str, Any] = {"gconfig": config.gconfig, "tokenizer": tokenizer, "train_data": config.train_data}
    if isinstance(config.reward, RewardModelConfig):
        changes = {"path": config.reward.model, "init_from_scratch": False, "is_critic": True}
        lines += check_model("reward.model", derive_reference(config.actor, changes, "reward.model"), {}, **options)
        offered["reward_fn"] = RewardModel(config.reward.model)
    elif config.reward is not None:
        offered["reward_fn"] = get_reward_fn(config.reward)
    resolve_workflow(config.workflow, config.workflow_args, **offered)
    return [*lines, f"reward: {config.reward or 'of the workflow'}", f"workflow: {config.workflow}"]


def check_preference(config: PreferenceConfig, gpu: str | None = None) -> list[str]:
    """Check a preference run; see `check_rl`."""
    lines = check_sft(config, gpu)
    ref = config.resolve().ref
    if ref is not None and ref.path != config.model.path:
        lines += check_model("ref", ref, {}, gpu=gpu)
    return lines


def check_sft(config: SFTConfig, gpu: str | None = None) -> list[str]:
    """Check an SFT run; see `check_rl`."""
    from archon.parallel.layout import parse_layout
    from archon.tools.planner.prediction import Batch
    from archon.training.batch_sharding import require_documents
    from archon.training.sinks import require_sinks

    check_run_dir(config.run_dir, resume=config.resume)
    require_sinks(config.metrics.sinks)
    require_documents(config.batch_size, parse_layout(config.model.layout).dp, "batch_size")
    with blank_checkpoint(read_bootstrap(config.bootstrap), config.model.path) as blanks:
        documents = config.batch_size * (1 if config.data_kind == "sft" else 2)  # a pair is two documents
        max_tokens = config.model.max_tokens_per_mb
        batch = Batch(documents, min(config.train_data.max_length or max_tokens, max_tokens))
        lines = check_model("model", config.resolve().model, blanks, config.optimizer_steps, gpu=gpu, batch=batch)
        tokenizer, line = check_tokenizer(config.tokenizer or config.model.path, blanks)
    lines.append(line)
    for name, data in (("train_data", config.train_data), ("eval_data", config.eval_data)):
        lines += check_data(name, data, config.data_kind, tokenizer, config.model.max_tokens_per_mb)
    return lines


def check_bootstrap(config: BootstrapConfig) -> list[str]:
    """Check a standalone bootstrap; see `check_rl`."""
    from archon.rl.bootstrap import bootstrap_engine
    from archon.rl.rewards import get_reward_fn

    assert config.path is not None
    if Path(config.path).exists():
        return [f"{config.path} already exists: reused if it was created with the same settings, otherwise an error"]
    steps = None if config.warmup is None else config.warmup.total_steps
    engine = bootstrap_engine(config, None, config.path)
    with blank_checkpoint(config, config.path) as blanks:
        lines = check_model("model", engine, blanks, steps)
        tokenizer, line = check_tokenizer(config.path, blanks)
    lines.append(line)
    if config.warmup is not None:
        lines += check_data("warmup.train_data", config.warmup.train_data, "sft", tokenizer)
        if (target := config.warmup.target) is not None:
            lines += check_data("warmup.target.eval_data", target.eval_data, "rl", tokenizer)
            get_reward_fn(target.reward)
            lines.append(f"warmup.target.reward: {target.reward}")
    return lines


@contextmanager
def blank_checkpoint(bootstrap: BootstrapConfig | None, path: str) -> Iterator[dict[str, str]]:
    """Yield {checkpoint path: temporary folder with its config and tokenizer}; {} if no bootstrap is pending."""
    if bootstrap is None or Path(path).exists():
        yield {}
        return
    from archon.rl.bootstrap import write_blank

    with PrivateDirectory("archon-config-") as folder:
        write_blank(bootstrap, folder.path)
        yield {path: str(folder.path)}


def check_run_dir(path: str | Path, *, resume: bool) -> None:
    """Reject a run directory that cannot be written or contains another run. Creates nothing."""
    from archon.training.runner import RunDirectory

    folder = RunDirectory(path)
    folder.require_usable()
    if folder.has_run() and not resume:
        raise ConfigError(f"run directory {path} already holds a run; set resume=true or choose another run_dir")


def check_model(
    name: str,
    config: EngineConfig,
    blanks: Mapping[str, str],
    total_steps: int | None = None,
    gpu: str | None = None,
    batch: Batch | None = None,
) -> list[str]:
    """Check a model's layout, device, attention backend, schedule, config and files without reading its weights.

    Args:
        name: Name of the model in the returned lines.
        config: Config of the model.
        blanks: Temporary folders of checkpoints that the bootstrap has yet to create, by path.
        total_steps: Optimizer steps of the run; None skips the check of the schedule.
        gpu: GPU name or hardware file to check for in place of the local device.
        batch: Documents of a training step, for the prediction on `gpu`.
    """
    import torch

    from archon.checkpoint.hf_reader import HFCheckpoint, read_hf_config
    from archon.engine.build import resolve_device
    from archon.engine.optim import check_schedule
    from archon.models.attention.registry import resolve_backend, supports_gathered
    from archon.parallel.process_group import require_processes, torchrun_world_size
    from archon.parallel.resolve import resolve_layout
    from archon.tools.planner.hardware import read_hardware
    from archon.tools.planner.inspection import inspect_checkpoint
    from archon.tools.planner.prediction import predict, predict_recompute

    if gpu is None:
        device = resolve_device(config.device)
        resolve_backend(config.attn_type, device, getattr(torch, config.dtype))
    elif config.device == "cpu":
        raise ConfigError(f"{name}.device is cpu, and --gpu {gpu} predicts a run on a GPU; set it to cuda or auto")
    else:
        device = torch.device("cuda")
    if config.optimizer is not None and total_steps is not None:
        check_schedule(config.scheduler, total_steps)
    hf_config = read_hf_config(blanks.get(config.path, config.path))
    inspection = inspect_checkpoint(config.path, hf_config)
    if inspection.refused:
        raise ConfigError(f"{config.path}: archon refuses this checkpoint: {'; '.join(inspection.refused)}")
    assert inspection.args is not None
    gathered = supports_gathered(config.attn_type)
    layout = resolve_layout(config, inspection.args.sizes, device.type, supports_gathered=gathered).layout
    if config.path not in blanks and not config.init_from_scratch:
        with HFCheckpoint(config.path):
            pass  # opening the checkpoint checks its files
    _check_layers(config, blanks)
    # A single process checks for all ranks. Under torchrun the world size must match the layout.
    single_process = torchrun_world_size() == 1
    if not single_process:
        require_processes(layout.world_size)
    origin = ", to be created by the bootstrap" if config.path in blanks else ""
    lines = [f"{name}: {inspection.family}, {inspection.parameters:,} parameters{origin}"]
    if layout.world_size > 1:
        torchrun = f"torchrun --nproc-per-node {layout.world_size} -m archon …"
        hint = f": start the run with {torchrun}" if single_process else ""
        lines.append(f"{name}: layout {config.layout} on {layout.world_size} processes{hint}")
    if config.optimizer is None:
        return lines
    if gpu is not None and batch is not None:
        lines += [f"{name}: {line}" for line in predict(config, hf_config, read_hardware(gpu), batch).lines()]
    elif config.activation_checkpoint.mode == "auto":
        lines.append(f"{name}: activation_checkpoint {predict_recompute(config, hf_config, device)}")
    return lines


def _check_layers(config: EngineConfig, blanks: Mapping[str, str]) -> None:
    """Check that the model has the layers that `mtp_loss_weight` trains and that `lora.quantize_base` quantizes."""
    from archon.checkpoint.hf_io import load_spec
    from archon.engine.build import check_quantized_base, lora_sizes, lora_specs, saved_modules, with_mtp_layers

    quantizes = config.lora is not None and config.lora.quantize_base != "none"
    if not quantizes and not config.mtp_loss_weight:
        return
    path = blanks.get(config.path, config.path)
    options = {"is_critic": config.is_critic, "init_score": bool(config.init_score)}
    adapter = load_spec(path, text_only=config.vision == "off", **options).adapter
    if config.lora is not None:
        for shape in lora_specs(config).values():
            sizes = lora_sizes(adapter, shape)
            saved = saved_modules(adapter, shape, sizes)
            check_quantized_base(config.lora.quantize_base, adapter, sizes, saved)
    # The tensors of a checkpoint that a bootstrap has yet to write are not checked.
    from_scratch = config.init_from_scratch or config.path in blanks
    with_mtp_layers(config.model_copy(update={"init_from_scratch": from_scratch}), adapter)


def check_tokenizer(path: str, blanks: Mapping[str, str]) -> tuple[Any, str]:
    """Return the tokenizer and a summary line."""
    from archon.checkpoint.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(blanks.get(path, path))
    return tokenizer, f"tokenizer: {len(tokenizer):,} tokens"


def check_data(
    name: str,
    config: DatasetConfig | None,
    kind: DatasetKind,
    tokenizer: Any,
    max_tokens: int | None = None,
    environments: Collection[str] | None = None,
) -> list[str]:
    """Load a dataset; require that training rows fit micro-batches of `max_tokens` and name one of `environments`."""
    from archon.data.registry import load_rows
    from archon.rl.prompts import require_environments
    from archon.training.sft import require_row_lengths

    if config is None:
        return []
    rows = load_rows(config, kind, tokenizer)
    if max_tokens is not None and name == "train_data":
        require_row_lengths(rows, max_tokens)
    if environments and name == "train_data":
        require_environments(rows, environments)
    dropped = {"too long": rows.n_filtered, "skipped": rows.n_skipped}
    counts = [f"{name}: {len(rows):,} rows", *(f"{count:,} {reason}" for reason, count in dropped.items() if count)]
    lines = [", ".join(counts)]
    if name == "train_data" and kind != "rl":
        lines.append(
            f"{name}: the first row, with the trained text between « and »:\n{mark_trained(tokenizer, rows[0])}"
        )
    return lines


def mark_trained(tokenizer: Any, row: Mapping[str, Any], most: int = 3000) -> str:
    """Return the text of an encoded row, or of a pair's chosen answer, with trained text between « and ».

    A text of more than `most` characters is cut in the middle.
    """
    names = ("input_ids", "loss_mask") if "input_ids" in row else ("chosen_ids", "chosen_loss_mask")
    ids, mask = row[names[0]], row[names[1]]
    text = ""
    for trained, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in run])
        text += f"«{piece}»" if trained else piece
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
