"""`archon convert SRC DST --to hf|native|megatron`: weights moved bit for bit between formats."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "name": "convert",
    "help": "Move weights between Hugging Face, archon and megatron-core.\n\n"
    "hf is a Hugging Face checkpoint, native one of archon's training, megatron the ranks of megatron-core's GPTModel.",
}


class Formats(StrEnum):
    hf = "hf"
    native = "native"
    megatron = "megatron"


class Specs(StrEnum):
    local = "local"
    te = "te"


class Experts(StrEnum):
    sequential = "sequential"
    grouped = "grouped"


class Dtypes(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="checkpoint folder")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="new folder")],
    to: Annotated[Formats, typer.Option("--to", help="format to write")],
    origin: Annotated[Formats | None, typer.Option("--from", help="format of SRC; found out when left out")] = None,
    like: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Hugging Face folder with config and tokenizer, for native")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="megatron: tensor-parallel ranks [1]")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="megatron: pipeline stages [1]")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="megatron: expert-parallel ranks [1]")] = None,
    spec: Annotated[
        Specs | None, typer.Option(help="megatron: names of the local or Transformer Engine's layers [local]")
    ] = None,
    experts: Annotated[
        Experts | None, typer.Option(help="megatron: a module an expert, or Transformer Engine's one [sequential]")
    ] = None,
    vocab_multiple: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="megatron: pad the vocabulary to a multiple of this times tp [128]"),
    ] = None,
    dtype: Annotated[Dtypes | None, typer.Option(help="hf: dtype to convert to; left out, none is converted")] = None,
    drop_padding: Annotated[
        bool, typer.Option("--drop-padding", help="from megatron: cut rows beyond the vocabulary that are not zero")
    ] = False,
) -> None:
    import torch

    from archon.checkpoint.convert import VOCAB_MULTIPLE, convert, detect_format
    from archon.checkpoint.hf_reader import checkpoint_folder
    from archon.checkpoint.megatron.sharding import MegatronLayout
    from archon.schema.errors import ConfigError

    kind = Formats(origin or detect_format(checkpoint_folder(source)))
    layout = MegatronLayout(
        tp or 1, pp or 1, ep or 1, (spec or Specs.local).value, (experts or Experts.sequential).value
    )
    of_megatron = {"tp": tp, "pp": pp, "ep": ep, "spec": spec, "experts": experts, "vocab-multiple": vocab_multiple}
    only = (
        (to, "to", Formats.megatron, of_megatron),
        (to, "to", Formats.hf, {"dtype": dtype}),
        (kind, "from", Formats.megatron, {"drop-padding": drop_padding or None}),
    )
    for given, option, wanted, values in only:
        for name, value in values.items():
            if value is not None and given != wanted:
                raise ConfigError(f"--{name} belongs to --{option} {wanted}; here it is {given}")
    weights = convert(
        source,
        target,
        to.value,
        origin=kind.value,
        like=like,
        layout=layout,
        vocab_multiple=vocab_multiple or VOCAB_MULTIPLE,
        dtype=None if dtype is None else getattr(torch, dtype),
        drop_padding=drop_padding,
    )
    files = list(target.rglob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print(
        f"{weights.hf_config['model_type']}, {len(weights.tensors):,} tensors: {kind} {source} -> {to} {target}, "
        f"{size / 1e9:,.3f} GB in {len(files)} file{'s' if len(files) > 1 else ''}"
    )
