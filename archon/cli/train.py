"""What the training commands share: a configuration in, a run directory with a report out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from archon.cli.config import load_config, read_bootstrap
from archon.cli.report import report_to

# command: its configuration, its trainer, and the field of the model that is trained
RUNS = {
    "sft": ("SFTConfig", "SFTTrainer", "model"),
    "preference": ("PreferenceConfig", "PreferenceTrainer", "model"),
    "rl": ("RLConfig", "RLTrainer", "actor"),
}


def train(command: str, file: Path | None, overrides: list[str] | None, dry_run: bool) -> None:
    """Run `command` of `RUNS`, or with `dry_run` only check it; leaves with the run's exit code."""
    leave_with(lambda: _run(command, file, overrides or [], dry_run))


def leave_with(run: Callable[[], int]) -> None:
    """Leave with the exit code that `run` returns, or that of a Ctrl-C outside of what it trains."""
    try:
        exit_code = run()
    except KeyboardInterrupt:  # outside the run itself, where the signal is a request
        sys.stderr.write("archon: interrupted\n")
        exit_code = 128 + signal.SIGINT
    raise typer.Exit(exit_code)


def _run(command: str, file: Path | None, overrides: list[str], dry_run: bool) -> int:
    import archon.rl as rl

    config_name, trainer_name, model = RUNS[command]
    config_type = getattr(rl, config_name)
    if command == "rl":
        from archon.rl.compat.trinity.config import translate

        config = load_config(config_type, file, overrides, translate)
    else:
        config = load_config(config_type, file, overrides)
    bootstrap = read_bootstrap(config.bootstrap)
    if dry_run:
        from archon.cli import check

        check.print_check(config, getattr(check, f"check_{command}"))
        return 0
    from archon.rl.bootstrap import ensure_checkpoint
    from archon.training.loop import join_processes
    from archon.training.runner import Runner

    config = join_processes(config, getattr(config, model))
    engine = getattr(config, model)
    bootstrap = bootstrap and join_processes(bootstrap, engine)
    with Runner(config.run_dir, config, resume=config.resume, sinks=config.metrics) as runner:
        if bootstrap and (number := ensure_checkpoint(bootstrap, engine.path, like=engine, log=runner.log)):
            runner.request_stop(number)
        else:
            getattr(rl, trainer_name)(config, runner).train()
        if runner.world.is_main:
            report_to(runner)
    return runner.exit_code
