"""`archon export SRC DST`: export LoRAs in PEFT format, or merge them into a copy of their base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

SETTINGS: dict[str, Any] = {
    "name": "export",
    "help": "Export LoRAs in PEFT format, or merge them.\n\n"
    "SRC is a checkpoint of a LoRA run or its folder. --merge and --experts also accept a PEFT folder. --merge writes "
    "a Hugging Face checkpoint in the base's dtypes; it adds in float32 and keeps one weight file in memory. --experts "
    "rewrites experts in another form.",
}


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="checkpoint of a run, or a PEFT folder or hub id")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="new folder")],
    base: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="base checkpoint; default: the base recorded in SRC")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="write the base with the LoRA merged")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="with --merge: dtype of all weights; default: unchanged"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the LoRA in a multi-LoRA run")] = None,
    experts: Annotated[
        Literal["stacked", "per_expert"] | None,
        typer.Option(
            help="format of expert LoRAs: stacked (default), for transformers 5, or per_expert, with checkpoint names, "
            "for older versions and other programs"
        ),
    ] = None,
) -> None:
    """Export or merge the LoRA of a run."""
    import torch

    from archon.checkpoint.convert import convert
    from archon.checkpoint.peft.export import base_checkpoint, export_lora, is_peft_folder
    from archon.models.hf.quantization import FIELD
    from archon.schema.errors import ConfigError

    if not merge and dtype is not None:
        raise ConfigError("--dtype requires --merge; exported LoRAs keep their training dtype")
    if merge and experts is not None:
        raise ConfigError("--experts and --merge exclude each other: --merge writes no LoRA; remove one of them")
    if not merge and experts is None and is_peft_folder(source):
        raise ConfigError(f"{source} is already in PEFT format; add --merge to merge it into its base")
    checkpoint = base or base_checkpoint(source)
    if not merge:
        exported = export_lora(source, target, checkpoint, experts or "stacked", name)
        print(f"LoRAs of {len(exported.sizes)} matrices, {exported.parameters:,} parameters: {source} -> {target}")
        return
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    weights = convert(checkpoint, target, "hf", origin="hf", dtype=torch_dtype, lora=source, lora_name=name)
    print(f"{source} merged into {checkpoint} -> {target}, {len(weights.tensors):,} tensors")
    if quantized := weights.hf_config.get(FIELD):
        method = quantized.get("quant_method", "quantized")
        print(f"the base is {method}; all weights were dequantized, and the output is not quantized")
