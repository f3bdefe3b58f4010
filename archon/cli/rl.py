"""`archon rl`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from typing import Any

from archon.cli.config import config_command
from archon.cli.options import ConfigFile, DryRun, Overrides
from archon.cli.train import train

SETTINGS: dict[str, Any] = {
    "name": "rl",
    "help": "Reinforce a checkpoint on prompts with a reward.",
    "cls": config_command("archon.rl.config:RLConfig"),
}


def command(config: ConfigFile = None, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    train("rl", config, overrides, dry_run)
