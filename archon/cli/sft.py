"""`archon sft`: supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from archon.cli.config import config_command
from archon.cli.options import ConfigFile, DryRun, Overrides
from archon.cli.train import train

SETTINGS: dict[str, Any] = {
    "name": "sft",
    "help": "Fine-tune a checkpoint on examples.",
    "cls": config_command("archon.training.config:SFTConfig"),
}


def command(config: ConfigFile = None, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    train("sft", config, overrides, dry_run)
