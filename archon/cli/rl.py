"""`archon rl`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from typing import Any

import typer

from archon.cli.config import config_command, load_config
from archon.cli.options import ConfigFile, DryRun, Overrides
from archon.cli.report import report_to

SETTINGS: dict[str, Any] = {
    "name": "rl",
    "help": "Reinforce a checkpoint on prompts with a reward.",
    "cls": config_command("archon.rl.config:RLConfig"),
}


def command(config: ConfigFile = None, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    from archon.rl.config import RLConfig

    resolved = load_config(RLConfig, config, overrides or [])
    if dry_run:
        from archon.cli.check import check_rl, print_check

        print_check(resolved, check_rl)
        return
    from archon.rl.loop import join

    resolved = join(resolved, resolved.actor)
    from archon.rl.trainer import RLTrainer
    from archon.runner import Runner

    with Runner(resolved.run_dir, resolved, resume=resolved.resume) as runner:
        RLTrainer(resolved, runner).train()
        if runner.world.is_main:
            report_to(runner)
    raise typer.Exit(runner.exit_code)
