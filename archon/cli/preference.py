"""`archon preference`: DPO, IPO and reward models."""

from __future__ import annotations

from typing import Any

from archon.cli.config import config_command
from archon.cli.options import ConfigFile, DryRun, Overrides
from archon.cli.train import train

SETTINGS: dict[str, Any] = {
    "name": "preference",
    "help": "Train a policy (DPO, IPO) or a reward model on pairs of answers.",
    "cls": config_command("archon.training.config:PreferenceConfig"),
}


def command(config: ConfigFile = None, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    train("preference", config, overrides, dry_run)
