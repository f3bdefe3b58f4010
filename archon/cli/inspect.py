"""`archon inspect PATH`: print family, parameters, FLOPs, memory, refused config fields and pseudo-code."""

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
    "help": "Describe a checkpoint: family, parameters, FLOPs, memory.\n\n"
    "It also lists refused fields. --blocks prints the layers, --lora describes a LoRA.",
}

GIB = 2**30


def command(
    path: Annotated[Path, typer.Argument(help="checkpoint folder, a folder with only config.json, or a hub id")],
    seq_len: Annotated[
        int, typer.Option("--seq-len", metavar="TOKENS", min=1, max=2**40, help="document length for FLOPs")
    ] = 4096,
    lora: LoRAFolder = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="print each kind of layer as pseudo-code, with the shapes of its weights")
    ] = False,
) -> None:
    """Print what a checkpoint holds; fail if archon refuses it."""
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.checkpoint.hub import CONFIG_FILES, model_folder
    from archon.checkpoint.peft.export import base_checkpoint, is_peft_folder
    from archon.checkpoint.tokenizer import has_tokenizer
    from archon.schema.errors import ConfigError
    from archon.tools.planner.inspection import inspect_checkpoint

    if lora is None and is_peft_folder(path):
        try:
            lora, path = path, base_checkpoint(path)
        except ConfigError as error:
            reason = str(error).partition("; set --base")[0]
            raise ConfigError(f"{reason}; show the LoRA with archon inspect BASE --lora {path}") from None
    inspection = inspect_checkpoint(path, read_hf_config(path), seq_len)
    print("\n".join(describe(inspection)))
    if inspection.refused:
        raise ConfigError(f"{path}: archon refuses this checkpoint: {'; '.join(inspection.refused)}")
    folder = model_folder(path, CONFIG_FILES)
    is_usable = True
    if path.exists() or any(folder.glob("*.safetensors")):  # of a hub id only the config may be in the cache
        weights, is_usable = describe_weights(folder)
        print(f"  weights      {weights}")
    if has_tokenizer(folder):
        print(describe_stops(folder))
    else:
        print("  tokenizer    none; copy the files of the model's tokenizer into the folder")
    if inspection.is_reward_model:
        print(f"  next         a reward model: archon rl reward.model={path}, or reward: {{model: {path}}} in its file")
    elif is_usable:
        option = "" if lora is None else f" --lora {lora}"
        print(f"  next         archon generate {path}{option} --prompt TEXT")
    if lora is not None:
        print("\n".join(describe_lora(lora, path, inspection.parameters)))
    if blocks and inspection.args is not None:
        from archon.tools.describe_blocks import describe_blocks

        print("\n".join(["", *describe_blocks(inspection.args)]))


def describe_weights(folder: Path) -> tuple[str, bool]:
    """Return (text, readable): size and dtypes of a folder's weights, or the reason why archon cannot read them."""
    from archon.checkpoint.hf_reader import HFCheckpoint
    from archon.schema.errors import CheckpointError

    try:
        with HFCheckpoint(folder) as checkpoint:
            entries, count = checkpoint.entries.values(), len({file.path for file in checkpoint.files.values()})
    except CheckpointError as error:
        return str(error).removeprefix(f"{folder}: "), False
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in entries})
    size = sum(entry.end - entry.start for entry in entries)
    return f"{size:,} bytes of {' and '.join(dtypes)} in {count} file{'s' if count > 1 else ''}", True


def describe_stops(path: Path) -> str:
    """Return a line with the tokens at which an answer ends."""
    from archon.checkpoint.chat_template import stop_tokens
    from archon.checkpoint.tokenizer import load_tokenizer
    from archon.schema.errors import TokenizerError

    try:
        tokenizer = load_tokenizer(path)
    except TokenizerError as error:
        return f"  stops at     unknown: {error}"
    stops = [f"{token} ({number})" for number, token in stop_tokens(tokenizer).items()]
    return f"  stops at     {', '.join(stops)}"


def describe(inspection: Inspection) -> list[str]:
    """Return the inspection as lines of text."""
    from archon.tools.planner.inspection import IMAGE_PATCHES

    lines = [
        f"{inspection.path.resolve().name}",
        f"  family       {inspection.family or 'none'} (model_type {inspection.model_type})",
    ]
    if inspection.args is not None:
        a = inspection.args
        lines += [
            f"  shape        {a.n_layers} layers of {a.dim}, feed-forward {a.hidden_dim}, vocabulary {a.vocab_size:,}",
            f"  attention    {a.n_heads} heads of {a.head_dim}, {a.n_kv_heads} key-value heads",
            f"  positions    {a.max_seq_len:,} tokens, RoPE {', '.join(_rope(rope) for rope in a.ropes) or 'none'}"
            + (f", sliding window {a.sliding_window}" if a.sliding_window else ""),
            f"  tied         {'yes' if a.tie_word_embeddings else 'no'}",
        ]
    if inspection.parts:
        lines.append(f"  parameters   {inspection.parameters:,}")
    if inspection.flops is not None:
        lines.append(
            f"  training     {_gflop(inspection.flops.full)} | {_gflop(inspection.flops.causal)} GFLOP a token at "
            f"{inspection.seq_len} tokens (full | causal)"
        )
    if inspection.image_flops is not None:
        lines.append(f"  an image     {_gflop(inspection.image_flops)} GFLOP forward, for {IMAGE_PATCHES:,} patches")
    if inspection.parts:
        lines += ["", *_memory(inspection)]
    return lines


def describe_lora(folder: Path, checkpoint: Path, parameters: int) -> list[str]:
    """Return a LoRA as lines of text.

    Args:
        folder: The PEFT folder, or its hub id.
        checkpoint: The checkpoint folder.
        parameters: Number of parameters of the checkpoint.

    Raises:
        CheckpointError: The LoRA does not fit the checkpoint's model.
    """
    from collections import Counter

    from archon.checkpoint.hf_reader import read_hf_config
    from archon.checkpoint.hub import model_folder
    from archon.checkpoint.peft.reader import WEIGHTS_FILE, read_peft_config, read_sizes
    from archon.checkpoint.safetensors_file import SafetensorsFile
    from archon.models import get_model_spec
    from archon.models.lora.targets import hf_modules

    config, hf_config = read_peft_config(folder), read_hf_config(checkpoint)
    family = get_model_spec(hf_config["model_type"]).state_dict_adapter_class(hf_config)
    sizes = read_sizes(folder, family)
    with SafetensorsFile(model_folder(folder) / WEIGHTS_FILE) as file:
        count = sum(math.prod(entry.shape) for entry in file.entries.values())
        size = sum(entry.end - entry.start for entry in file.entries.values())
        dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in file.entries.values()})
    modules = sorted({module.rpartition(".")[2] for name in sizes for module in hf_modules(family, name)})
    kinds = Counter(
        (one.rank, one.alpha, one.scale, ", DoRA" if one.dora else "") for one in sizes.values()
    ).most_common()
    return [
        "",
        f"  lora         {folder}",
        f"  base         {config.base or 'not named'}; it fits this checkpoint",
        *(
            f"  rank         {rank}, alpha {alpha:g}, scale {scale:.4g}{dora}, {matrices} matrices"
            for (rank, alpha, scale, dora), matrices in kinds
        ),
        f"  targets      {', '.join(modules)}",
        f"  parameters   {count:,}, {100 * count / parameters:.2g} % of the checkpoint's",
        f"  size         {size:,} bytes of {' and '.join(dtypes)}",
    ]


def _rope(rope: RopeSpec) -> str:
    return f"{rope.scaling.kind}, theta {rope.theta:g}"


def _memory(inspection: Inspection) -> list[str]:
    headings = ("memory, GiB", "parameters", "bf16", "masters", "gradients", "AdamW", "in training")
    rows: list[tuple[str, ...]] = [headings]
    for part in inspection.parts:
        state = part.state
        sizes = (part.served_bytes, *state, state.total)
        rows.append((part.name, f"{part.parameters:,}", *(f"{size / GIB:.2f}" for size in sizes)))
    totals = [
        sum(sizes) for sizes in zip(*((p.served_bytes, *p.state, p.state.total) for p in inspection.parts), strict=True)
    ]
    rows.append(("total", f"{inspection.parameters:,}", *(f"{size / GIB:.2f}" for size in totals)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    lines = ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [
        *lines,
        f"  masters, gradients and AdamW in float32; KV cache {inspection.kv_bytes:,} bytes a token in bf16",
    ]


def _gflop(flops: float) -> str:
    """Return GFLOP with two decimals below ten and one above."""
    number = flops / 1e9
    return f"{number:.2f}" if number < 10 else f"{number:.1f}"
