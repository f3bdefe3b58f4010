"""`archon bootstrap`: create a small checkpoint from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.cli.config import config_command, load_config
from archon.cli.options import ConfigFile, DryRun, Overrides
from archon.cli.train import exit_with
from archon.schema.errors import ConfigError

SETTINGS: dict[str, Any] = {
    "name": "bootstrap",
    "help": "Create a small checkpoint from scratch.\n\n"
    "It has a config, a tokenizer, and random weights with an SFT warm-up.",
    "cls": config_command("archon.training.config:BootstrapConfig"),
}


def command(config: ConfigFile = None, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Create a small checkpoint from scratch."""
    exit_with(lambda: _run(config, overrides or [], dry_run))


def _run(file: Path | None, overrides: list[str], dry_run: bool) -> int:
    from archon.training.config import BootstrapConfig

    config = load_config(BootstrapConfig, file, overrides)
    if config.path is None:
        raise ConfigError("the checkpoint has no path; set path=FOLDER")
    if dry_run:
        from archon.cli.check import check_bootstrap, print_check

        print_check(config, check_bootstrap)
        return 0
    from archon.rl.bootstrap import bootstrap_engine, ensure_checkpoint
    from archon.training.loop import join_processes

    config = join_processes(config, bootstrap_engine(config, None, config.path))
    assert config.path is not None
    signal_number = ensure_checkpoint(config, config.path)
    return 128 + signal_number if signal_number else 0
