"""Small checkpoints of every family, on their way to megatron-core's ranks and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from archon.checkpoint.convert import convert
from archon.checkpoint.formats.megatron.rank_files import MANIFEST_FILE
from archon.checkpoint.formats.megatron.sharding import MegatronLayout
from tests.checkpoint.tiny_checkpoints import MOE, QWEN2, make_checkpoint

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 36}
EXPERTS: dict[str, Any] = MOE | {"num_experts": 4, "moe_intermediate_size": 8}
FAMILIES = {"qwen2": SIZES | QWEN2, "qwen3": SIZES, "moe": SIZES | EXPERTS}
LAYOUTS = [
    MegatronLayout(),
    MegatronLayout(tp=2),
    MegatronLayout(tp=4, pp=2),
    MegatronLayout(pp=2, spec="te", experts="grouped"),
    MegatronLayout(tp=2, pp=2, ep=2, experts="grouped"),
    MegatronLayout(ep=4),
]


def read_back(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def to_megatron(tmp_path: Path, layout: MegatronLayout | None = None, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """The ranks' folder of a small checkpoint, without the manifest that would notice every change, and its weights."""
    folder, weights = make_checkpoint(tmp_path / "hf", **changes)
    convert(folder, tmp_path / "ranks", "megatron", layout=layout)
    (tmp_path / "ranks" / MANIFEST_FILE).unlink()
    return tmp_path / "ranks", weights


def edit(file: Path, change: Any) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
