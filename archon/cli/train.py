"""Training commands `archon sft`, `preference` and `rl`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer

from archon.checkpoint.hub import config_file, parse_hub_id
from archon.cli.config import config_command, import_schema, load_config, read_bootstrap, read_values
from archon.cli.options import ConfigFile, DryRun, Overrides, PresetName, TargetGpu
from archon.cli.report import write_run_report
from archon.schema.config import expand_path
from archon.schema.errors import ConfigError


class Run(NamedTuple):
    """A training command.

    Attributes:
        help: Help text.
        config: "module:Class" of its configuration.
        trainer: Name in `archon.rl` that builds its trainer.
        model: Config field of the trained model.
    """

    help: str
    config: str
    trainer: str
    model: str


RUNS = {
    "sft": Run("Fine-tune a checkpoint on examples.", "archon.training.config:SFTConfig", "SFTTrainer", "model"),
    "preference": Run(
        "Train a policy or a reward model on preferences.\n\nLosses: DPO, IPO, CPO, SimPO, ORPO, KTO, and reward.",
        "archon.training.config:PreferenceConfig",
        "PreferenceTrainer",
        "model",
    ),
    "rl": Run("Train a checkpoint on prompts with a reward.", "archon.rl.config:RLConfig", "make_trainer", "actor"),
}


def settings(name: str) -> dict[str, Any]:
    """Return the settings of the command `name` of `RUNS`."""
    return {"name": name, "help": RUNS[name].help, "cls": config_command(RUNS[name].config)}


def command(name: str) -> Callable[..., None]:
    """Return the command `name` of `RUNS`."""

    def train(
        config: ConfigFile = None, overrides: Overrides = None, dry_run: DryRun = False, gpu: TargetGpu = None
    ) -> None:
        exit_with(lambda: run_training(name, config, overrides or [], dry_run, gpu))

    def train_rl(
        config: ConfigFile = None,
        overrides: Overrides = None,
        preset: PresetName = None,
        dry_run: DryRun = False,
        gpu: TargetGpu = None,
    ) -> None:
        if preset == "list":
            from archon.rl.algorithms.preset_table import text_table

            print(text_table())
            return
        chosen = [] if preset is None else [f"algorithm.preset={preset}"]
        exit_with(lambda: run_training(name, config, [*chosen, *(overrides or [])], dry_run, gpu))

    return train_rl if name == "rl" else train


def exit_with(run: Callable[[], int]) -> NoReturn:
    """Exit with the code that `run` returns, or 130 after Ctrl-C."""
    try:
        exit_code = run()
    except KeyboardInterrupt:  # outside training, where the signal requests a stop
        sys.stderr.write("archon: interrupted\n")
        exit_code = 128 + signal.SIGINT
    raise typer.Exit(exit_code)


def run_training(command: str, file: Path | None, overrides: list[str], dry_run: bool, gpu: str | None = None) -> int:
    """Run a command of `RUNS`, or with `dry_run` check its configuration, for `gpu` if set. Returns the exit code."""
    run = RUNS[command]
    from archon.rl.compat.areal.config import reject_areal_config

    values = read_values(file, overrides)
    reject_areal_config(values, str(file or "config"))
    require_files(values, run.model)  # fails before PyTorch is imported, which takes seconds
    translate: Callable[[dict[str, Any], str], dict[str, Any]] | None = None
    if command == "rl":
        from archon.rl.compat.trinity import config as trinity

        translate = trinity.translate
    config: Any = load_config(import_schema(run.config), file, overrides, translate)
    bootstrap = read_bootstrap(config.bootstrap)
    if dry_run:
        from archon.cli import check
        from archon.training.runner import require_separate_run

        require_separate_run(Path(config.run_dir), config)
        check.print_check(config, partial(getattr(check, f"check_{command}"), gpu=gpu))
        return 0
    if gpu is not None:
        raise ConfigError(f"--gpu {gpu} needs --dry-run, which predicts the run; to start it, set {run.model}.device")
    import archon.rl as rl
    from archon.engine.optim import check_schedule
    from archon.rl.bootstrap import ensure_checkpoint
    from archon.training.loop import join_processes
    from archon.training.runner import Runner

    config = join_processes(config, getattr(config, run.model))
    engine = getattr(config, run.model)
    bootstrap = bootstrap and join_processes(bootstrap, engine)
    if bootstrap and config.optimizer_steps is not None:  # fail before the bootstrap, which takes minutes
        for model in filter(None, (engine, getattr(config.resolve(), "critic", None))):
            multi_lora = model.lora is not None and model.lora.loras is not None  # each LoRA has a separate schedule
            if model.optimizer and not multi_lora:
                check_schedule(model.scheduler, config.optimizer_steps)
    with Runner(config.run_dir, config, resume=config.resume, sinks=config.metrics) as runner:
        if bootstrap and (signal_number := ensure_checkpoint(bootstrap, engine.path, like=engine, log=runner.log)):
            runner.request_stop(signal_number)
        else:
            getattr(rl, run.trainer)(config, runner).train()
        if runner.world.is_main:
            write_run_report(runner, config)
    return runner.exit_code


def require_files(values: dict[str, Any], model: str) -> None:
    """Raise CheckpointError if a run's values name a model's folder that is not there, without importing PyTorch."""
    section = values.get(model)
    path = section.get("path") if isinstance(section, dict) else None
    if isinstance(path, str) and path and "\0" not in path and values.get("bootstrap") is None:
        folder = expand_path(path)
        if parse_hub_id(folder) is None:
            config_file(folder)
