"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CheckpointFolder = Annotated[Path, typer.Argument(help="checkpoint folder")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE.yaml", help="configuration file")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="values laid over the file, keys dotted")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the resolved configuration, check it, and stop")]
