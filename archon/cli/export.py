"""`archon export SRC DST`: writes a run's adapters in PEFT's format, or merges adapters into a copy of their base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

SETTINGS: dict[str, Any] = {
    "name": "export",
    "help": "Write adapters in PEFT's format, or merged into a copy of their base.\n\n"
    "SRC is a checkpoint of a run that trained adapters, or its folder. With --merge it may also be a folder in PEFT's "
    "format, and DST becomes a Hugging Face checkpoint: sums in float32, one file of weights in memory at a time, in "
    "the base's dtypes. With --experts it may also be one, to write its experts in another form.",
}


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="checkpoint of a run, or an adapter's folder")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="new folder")],
    base: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="checkpoint that SRC adapts; default: the one that SRC names")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="write the base with the adapters merged")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="with --merge: dtype of all weights; kept when left out"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="which adapter of a run that trained several")] = None,
    experts: Annotated[
        Literal["stacked", "per_expert"] | None,
        typer.Option(
            help="how experts' adapters are written: stacked (the default), as transformers 5 has experts, or "
            "per_expert, as checkpoints name them, older versions and other programs"
        ),
    ] = None,
) -> None:
    import torch

    from archon.checkpoint.convert import convert
    from archon.checkpoint.peft.export import base_checkpoint, export_lora, is_peft_folder
    from archon.models.hf.quantization import FIELD
    from archon.schema.errors import ConfigError

    if not merge and dtype is not None:
        raise ConfigError("--dtype belongs to --merge; adapters keep the dtype that they were trained in")
    if merge and experts is not None:
        raise ConfigError("--experts is how adapters of experts are written, and --merge writes none; leave one out")
    if not merge and experts is None and is_peft_folder(source):
        raise ConfigError(f"{source} is in PEFT's format already; add --merge to write it merged into its base")
    checkpoint = base or base_checkpoint(source)
    if not merge:
        found = export_lora(source, target, checkpoint, experts or "stacked", name)
        print(f"adapters of {len(found.sizes)} matrices, {found.parameters:,} parameters: {source} -> {target}")
        return
    wanted = None if dtype is None else getattr(torch, dtype)
    weights = convert(checkpoint, target, "hf", origin="hf", dtype=wanted, lora=source, lora_name=name)
    print(f"{source} merged into {checkpoint} -> {target}, {len(weights.tensors):,} tensors")
    if quantized := weights.hf_config.get(FIELD):
        method = quantized.get("quant_method", "quantized")
        print(f"the base is {method}; all of its weights were dequantized, and the copy is not quantized")
