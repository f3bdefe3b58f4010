"""`archon inspect PATH`: prints family, parameters, FLOPs, memory, and config fields that archon refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archon.cli.options import LoRAFolder

if TYPE_CHECKING:
    from archon.models.layers.rope import RopeSpec
    from archon.tools.planner.inspection import Inspection

SETTINGS: dict[str, Any] = {
    "name": "inspect",
    "help": "Show family, parameters, FLOPs, memory and refused fields; with --lora also an adapter of it.",
}

GIB = 2**30


def command(
    path: Annotated[Path, typer.Argument(help="checkpoint folder, or one that holds only config.json")],
    seq_len: Annotated[
        int, typer.Option("--seq-len", metavar="TOKENS", min=1, max=2**40, help="document length for FLOPs")
    ] = 4096,
    lora: LoRAFolder = None,
) -> None:
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.schema.errors import ConfigError
    from archon.tools.planner.inspection import inspect_checkpoint

    found = inspect_checkpoint(path, read_hf_config(path), seq_len)
    print("\n".join(describe(found)))
    if found.refused:
        raise ConfigError(f"{path}: archon refuses this checkpoint: {'; '.join(found.refused)}")
    if lora is not None:
        print("\n".join(describe_lora(lora, path, found.parameters)))


def describe(found: Inspection) -> list[str]:
    """Return the inspection as lines of text."""
    from archon.tools.planner.inspection import IMAGE_PATCHES

    lines = [f"{found.path.resolve().name}", f"  family       {found.family or 'none'} (model_type {found.model_type})"]
    if found.args is not None:
        a = found.args
        lines += [
            f"  shape        {a.n_layers} layers of {a.dim}, feed-forward {a.hidden_dim}, vocabulary {a.vocab_size:,}",
            f"  attention    {a.n_heads} heads of {a.head_dim}, {a.n_kv_heads} key-value heads",
            f"  positions    {a.max_seq_len:,} tokens, RoPE {', '.join(_rope(rope) for rope in a.ropes) or 'none'}"
            + (f", sliding window {a.sliding_window}" if a.sliding_window else ""),
            f"  tied         {'yes' if a.tie_word_embeddings else 'no'}",
        ]
    if found.parts:
        lines.append(f"  parameters   {found.parameters:,}")
    if found.flops is not None:
        lines.append(
            f"  training     {_gflop(found.flops.full)} | {_gflop(found.flops.causal)} GFLOP a token at "
            f"{found.seq_len} tokens (full | causal)"
        )
    if found.image_flops is not None:
        lines.append(f"  an image     {_gflop(found.image_flops)} GFLOP forward, of {IMAGE_PATCHES:,} patches")
    if found.parts:
        lines += ["", *_memory(found)]
    return lines


def describe_lora(folder: Path, checkpoint: Path, parameters: int) -> list[str]:
    """Return an adapter as lines of text. Raises CheckpointError where it is none of the checkpoint's model.

    Args:
        parameters: of the checkpoint.
    """
    from collections import Counter

    from archon.checkpoint.hf_reader import read_hf_config
    from archon.checkpoint.peft.reader import WEIGHTS_FILE, read_peft_config, read_sizes
    from archon.checkpoint.safetensors_file import SafetensorsFile
    from archon.models import get_model_spec
    from archon.models.lora.targets import hf_modules

    config, hf_config = read_peft_config(folder), read_hf_config(checkpoint)
    family = get_model_spec(hf_config["model_type"]).state_dict_adapter_class(hf_config)
    sizes = read_sizes(folder, family)
    with SafetensorsFile(folder / WEIGHTS_FILE) as file:
        count = sum(math.prod(entry.shape) for entry in file.entries.values())
        size = sum(entry.end - entry.start for entry in file.entries.values())
        dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in file.entries.values()})
    modules = sorted({module.rpartition(".")[2] for name in sizes for module in hf_modules(family, name)})
    kinds = Counter((one.rank, one.alpha, one.scale) for one in sizes.values()).most_common()
    return [
        "",
        f"  adapter      {folder}",
        f"  base         {config.base or 'not named'}; it fits this checkpoint",
        *(
            f"  rank         {rank}, alpha {alpha:g}, counted {scale:.4g} times, of {matrices} matrices"
            for (rank, alpha, scale), matrices in kinds
        ),
        f"  targets      {', '.join(modules)}",
        f"  parameters   {count:,}, {100 * count / parameters:.2g} % of the checkpoint's",
        f"  size         {size:,} bytes of {' and '.join(dtypes)}",
    ]


def _rope(rope: RopeSpec) -> str:
    return f"{rope.scaling.kind}, theta {rope.theta:g}"


def _memory(found: Inspection) -> list[str]:
    headings = ("memory, GiB", "parameters", "bf16", "masters", "gradients", "AdamW", "in training")
    rows: list[tuple[str, ...]] = [headings]
    for part in found.parts:
        state = part.state
        sizes = (part.served_bytes, *state, state.total)
        rows.append((part.name, f"{part.parameters:,}", *(f"{size / GIB:.2f}" for size in sizes)))
    totals = [
        sum(sizes) for sizes in zip(*((p.served_bytes, *p.state, p.state.total) for p in found.parts), strict=True)
    ]
    rows.append(("in all", f"{found.parameters:,}", *(f"{size / GIB:.2f}" for size in totals)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    lines = ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*lines, f"  masters, gradients and AdamW in float32; KV cache {found.kv_bytes:,} bytes a token in bf16"]


def _gflop(flops: float) -> str:
    """Return GFLOP with two decimals below ten and one above."""
    number = flops / 1e9
    return f"{number:.2f}" if number < 10 else f"{number:.1f}"
