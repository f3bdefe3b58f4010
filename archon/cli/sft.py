"""`archon sft`: supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import typer

from archon.cli.config import config_command, load_config, to_yaml
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
        from archon.cli.check import check_sft

        print(to_yaml(resolved), flush=True)
        print("\n".join(f"# {line}" for line in check_sft(resolved)))
        return
    from archon.rl.sft import SFTTrainer
    from archon.runner import Runner

    with Runner(resolved.run_dir, resolved, resume=resolved.resume) as runner:
        SFTTrainer(resolved, runner).train()
        report_to(runner)
    raise typer.Exit(runner.exit_code)
