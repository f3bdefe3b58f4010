"""`archon sft`: supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import typer

from archon.cli.config import config_command, load_config
from archon.cli.options import ConfigFile, DryRun, Overrides
from archon.cli.report import report_to

SETTINGS: dict[str, Any] = {
    "name": "sft",
    "help": "Fine-tune a checkpoint on examples.",
    "cls": config_command("archon.rl.config:SFTConfig"),
}


def command(config: ConfigFile = None, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    from archon.rl.config import SFTConfig

    resolved = load_config(SFTConfig, config, overrides or [])
    if dry_run:
        from archon.cli.check import check_sft, print_check

        print_check(resolved, check_sft)
        return
    from archon.rl.loop import join

    resolved = join(resolved, resolved.model)
    from archon.rl.sft import SFTTrainer
    from archon.runner import Runner

    with Runner(resolved.run_dir, resolved, resume=resolved.resume) as runner:
        SFTTrainer(resolved, runner).train()
        if runner.world.is_main:
            report_to(runner)
    raise typer.Exit(runner.exit_code)
