"""Shared command-line options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CheckpointFolder = Annotated[Path, typer.Argument(help="checkpoint folder, or hub id owner/name[@revision]")]
LoRAFolder = Annotated[
    Path | None,
    typer.Option("--lora", metavar="FOLDER", help="PEFT folder or hub id of a LoRA to apply unmerged"),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE.yaml", help="configuration file")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="override values of the file with dotted keys")
]
GPU_NAMES = "4090 | a100-80gb | b200 | h100-80gb | h200 | l40s | FILE.yaml"
TargetGpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help=f"with --dry-run: predict memory and time on this GPU, present or not: {GPU_NAMES}",
    ),
]
PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset", metavar="NAME", help="algorithm.preset=NAME; `list` prints all presets with their sources"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print and check the resolved configuration, then exit")]
