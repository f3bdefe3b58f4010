"""`archon convert SRC DST --to hf|native|dcp|megatron|gguf`: copy weights between formats, bit for bit but for GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

SETTINGS: dict[str, Any] = {
    "name": "convert",
    "help": "Convert weights between checkpoint formats.\n\n"
    "hf: Hugging Face checkpoint; native: archon training checkpoint; dcp: torch.distributed.checkpoint folder; "
    "megatron: one folder per rank for megatron-core's GPTModel; gguf: one file for llama.cpp, only written.",
}

Format = Literal["hf", "native", "dcp", "megatron"]
Target = Literal["hf", "native", "dcp", "megatron", "gguf"]


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="checkpoint folder")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="new folder")],
    to: Annotated[Target, typer.Option("--to", help="format to write")],
    origin: Annotated[Format | None, typer.Option("--from", help="format of SRC; default: detected")] = None,
    like: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="native, dcp: Hugging Face folder with config and tokenizer"),
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="megatron: tensor-parallel ranks [1]")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="megatron: pipeline stages [1]")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="megatron: expert-parallel ranks [1]")] = None,
    spec: Annotated[
        Literal["local", "te"] | None,
        typer.Option(help="megatron: layer names, local or Transformer Engine [local]"),
    ] = None,
    experts: Annotated[
        Literal["sequential", "grouped"] | None,
        typer.Option(help="megatron: one module per expert, or Transformer Engine's grouped module [sequential]"),
    ] = None,
    vocab_multiple: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="megatron: pad the vocabulary to a multiple of N * tp [128]"),
    ] = None,
    names: Annotated[
        Literal["native", "hf", "torchtitan"] | None,
        typer.Option(help="dcp: naming scheme of tensors; default: detected when reading, native when writing"),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="hf: dtype to convert to; default: unchanged"),
    ] = None,
    lora: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="PEFT folder or hub id of a LoRA to merge into the written weights"),
    ] = None,
    gguf_type: Annotated[
        Literal["f16", "q8_0", "f32"] | None, typer.Option("--gguf-type", help="gguf: type of matrices [f16]")
    ] = None,
    drop_padding: Annotated[
        bool, typer.Option("--drop-padding", help="from megatron: drop nonzero vocabulary padding")
    ] = False,
) -> None:
    """Convert a checkpoint to another format."""
    import torch

    from archon.checkpoint.convert import VOCAB_MULTIPLE, convert, detect_format
    from archon.checkpoint.formats.megatron.sharding import MegatronLayout
    from archon.checkpoint.hub import checkpoint_folder
    from archon.schema.errors import ConfigError

    kind = origin or detect_format(checkpoint_folder(source))
    layout = MegatronLayout(tp or 1, pp or 1, ep or 1, spec or "local", experts or "sequential")
    megatron = {"tp": tp, "pp": pp, "ep": ep, "spec": spec, "experts": experts, "vocab-multiple": vocab_multiple}
    required_formats = (
        (to, "to", "megatron", megatron),
        (to, "to", "hf", {"dtype": dtype}),
        (to, "to", "gguf", {"gguf-type": gguf_type}),
        (kind, "from", "megatron", {"drop-padding": drop_padding or None}),
    )
    for actual, option, required, values in required_formats:
        for name, value in values.items():
            if value is not None and actual != required:
                raise ConfigError(f"--{name} requires --{option} {required}; got {actual}")
    if names is not None and "dcp" not in (kind, to):
        raise ConfigError(f"--names requires the dcp format; got --from {kind} and --to {to}")
    weights = convert(
        source,
        target,
        to,
        origin=kind,
        like=like,
        layout=layout,
        vocab_multiple=vocab_multiple or VOCAB_MULTIPLE,
        dtype=None if dtype is None else getattr(torch, dtype),
        drop_padding=drop_padding,
        names=names,
        lora=lora,
        gguf_type=gguf_type or "f16",
    )
    files = [file for pattern in ("*.safetensors", "*.distcp", "*.gguf") for file in target.rglob(pattern)]
    size = sum(file.stat().st_size for file in files)
    print(
        f"{weights.hf_config['model_type']}, {len(weights.tensors):,} tensors: {kind} {source} -> {to} {target}, "
        f"{size / 1e9:,.3f} GB in {len(files)} file{'s' if len(files) > 1 else ''}"
    )
