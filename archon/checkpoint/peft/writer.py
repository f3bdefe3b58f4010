"""Write LoRAs in PEFT's format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from archon.checkpoint.atomic import replaced_export, write_json
from archon.checkpoint.hf_export import ASSETS, MODEL_CARD, copy_assets
from archon.checkpoint.hub import CONFIG_FILES, model_folder
from archon.checkpoint.peft.config import CONFIG_FILE, config_fields, fused_size
from archon.checkpoint.peft.layout import PREFIX, Pair, PeftTensor, key_pairs, magnitude_key, peft_tensors
from archon.checkpoint.peft.reader import PARTS, WEIGHTS_FILE
from archon.checkpoint.safetensors_file import write_safetensors
from archon.models.hf.state_dict import BaseStateDictAdapter, NativeTarget
from archon.models.lora.model import lora_parameter_names, magnitude_name
from archon.models.lora.saved_modules import outer_modules, tied_keys, whole_adapter
from archon.models.lora.targets import LoRASize, lora_matrices
from archon.parallel.control_plane import ControlPlane
from archon.schema.errors import CheckpointError, ConfigError

ExpertFiles = Literal["stacked", "per_expert"]
"""Layout of experts' LoRAs: stacked as in transformers 5, or one per expert as in checkpoints."""
# In a model with experts, PEFT treats every target module with such a suffix as an expert and converts it.
_EXPERT_SUFFIXES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class _Plan:
    """A tensor with a LoRA to write.

    Attributes:
        tensor: the adapted tensor.
        target: name in `target_modules` or `target_parameters`.
        sizes: LoRA sizes of the parts, None without a LoRA.
    """

    tensor: PeftTensor
    target: str
    sizes: tuple[LoRASize | None, ...]

    @property
    def is_parameter(self) -> bool:
        """Whether the target is listed in `target_parameters` instead of `target_modules`."""
        return self.tensor.experts is not None or self.target != self.tensor.name

    @property
    def has_dora(self) -> bool:
        """Whether the LoRA has magnitudes."""
        return any(size is not None and size.dora for size in self.sizes)

    def pairs(self, tensors: Mapping[str, Tensor]) -> list[Pair | None]:
        """Return the LoRAs of the parts from full tensors by native name."""
        parts = zip(self.tensor.parts, self.sizes, strict=True)
        return [None if size is None else _lora_pair(tensors, target) for target, size in parts]

    def full_size(self, rank: int) -> LoRASize | None:
        """Return the size of the fused LoRA; None if the scales of the parts differ."""
        return fused_size([size for size in self.sizes if size is not None], rank)


def _lora_pair(tensors: Mapping[str, Tensor], target: NativeTarget) -> Pair:
    a, b = (tensors[name] for name in lora_parameter_names(target.name))
    return (a, b) if target.index is None else (a[target.index], b[target.index])


def require_writable(
    adapter: BaseStateDictAdapter, sizes: Mapping[str, LoRASize], experts: ExpertFiles = "stacked"
) -> None:
    """Raise ConfigError for a LoRA that PEFT's format cannot hold."""
    _plans(adapter, sizes, experts)


def _plans(adapter: BaseStateDictAdapter, sizes: Mapping[str, LoRASize], experts: ExpertFiles) -> list[_Plan]:
    matrices = lora_matrices(adapter)
    stacked = peft_tensors(adapter.in_memory, matrices)
    tensors = stacked if experts == "stacked" else peft_tensors(adapter, matrices)
    converted = experts == "stacked" and any(tensor.experts is not None for tensor in stacked.values())
    plans = []
    for tensor in tensors.values():
        as_parameter = converted and tensor.experts is None and tensor.name.endswith(_EXPERT_SUFFIXES)
        target = f"{tensor.name}.weight" if as_parameter else tensor.name
        plan = _Plan(tensor, target, tuple(sizes.get(part.name) for part in tensor.parts))
        if any(size is not None for size in plan.sizes):
            plans.append(plan)
            if plan.full_size(1) is None:
                sizes_by_part = zip(plan.tensor.parts, plan.sizes, strict=True)
                scales = [f"{part.name!r} {size.scale:g}" for part, size in sizes_by_part if size is not None]
                raise ConfigError(
                    f"lora: scales differ ({', '.join(scales)}), but PEFT has one LoRA for the fused {tensor.name!r}; "
                    "use alpha_pattern to make alpha / rank (with rslora, alpha / sqrt(rank)) equal"
                    + ("" if tensor.experts is None else ", or set lora.export_experts to per_expert")
                )
            if plan.has_dora and None in plan.sizes:
                raise ConfigError(
                    f"lora.dora is true, and PEFT has one LoRA for the fused {tensor.name!r}, which has magnitudes for "
                    f"{', '.join(part.name for part in plan.tensor.parts)}; name all of them in targets"
                )
        if experts == "per_expert" and tensor.experts is not None:
            raise ConfigError(
                f"lora.export_experts is per_expert, but the checkpoint stacks its experts in {tensor.name!r}; set it "
                "to stacked"
            )
    return plans


def save_lora(
    path: str | os.PathLike[str],
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str, LoRASize],
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, Tensor] | None = None,
    *,
    base: str,
    experts: ExpertFiles = "stacked",
    tokenizer: Any = None,
    dropout: float = 0.0,
) -> None:
    """Write a LoRA in PEFT's format from rank 0. A collective; errors are raised on every rank.

    Args:
        path: folder to create, or an earlier export to replace atomically.
        adapter: adapter of the base model.
        sizes: LoRA sizes by matrix name.
        tensors: full tensors by native name; see `ArchonEngine.lora_weights`.
        modules: full tensors of saved modules by native name; see `ArchonEngine.saved_modules`.
        base: path or name of the base checkpoint.
        experts: layout of experts' LoRAs.
        tokenizer: the tokenizer to write, or its folder, besides the generation config of `base`; None: neither.
        dropout: `lora_dropout`, which PEFT applies in training.

    Raises:
        ConfigError: PEFT's format cannot hold the LoRA.
        CheckpointError: a value is not finite, or the folder cannot be written or holds other files.
    """
    ranks = ControlPlane.with_long_timeout("exports")

    def write() -> None:
        if ranks.is_main:
            write_lora(
                path,
                adapter,
                sizes,
                tensors,
                modules=modules,
                base=base,
                experts=experts,
                tokenizer=tokenizer,
                dropout=dropout,
            )

    ranks.run_on_all(write)


def write_lora(
    path: str | os.PathLike[str],
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str, LoRASize],
    tensors: Mapping[str, Tensor],
    *,
    base: str,
    modules: Mapping[str, Tensor] | None = None,
    experts: ExpertFiles = "stacked",
    tokenizer: Any = None,
    dropout: float = 0.0,
) -> None:
    """Write a LoRA like `save_lora`, from the calling rank alone."""
    target, saved = Path(os.path.realpath(path)), _saved_keys(adapter, modules or {})
    _write(target, adapter, _plans(adapter, sizes, experts), tensors, saved, base, tokenizer, dropout)


def _saved_keys(adapter: BaseStateDictAdapter, modules: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of saved modules by their names in transformers' model; a tied head repeats the embedding."""
    tensors = dict(whole_adapter(adapter).export(modules.items()))
    if (tied := tied_keys(adapter)) is not None and tied[0] in tensors:
        tensors[tied[1]] = tensors[tied[0]]
    return tensors


def _write(
    target: Path,
    adapter: BaseStateDictAdapter,
    plans: list[_Plan],
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    base: str,
    tokenizer: Any,
    dropout: float,
) -> None:
    keys = key_pairs(plan.tensor for plan in plans)
    by_key: dict[str, Tensor] = {}
    sizes: dict[str, LoRASize] = {}
    parts: dict[str, Any] = {}
    for plan in plans:
        name = plan.tensor.name
        pair, shared = plan.tensor.fuse(plan.pairs(tensors))
        written = dict(zip(keys[name], plan.tensor.to_file(pair), strict=True))
        if plan.has_dora:
            magnitudes = [tensors[magnitude_name(part.name)] for part in plan.tensor.parts]
            written[magnitude_key(plan.tensor)] = plan.tensor.fuse_magnitudes(magnitudes)
        by_key |= written
        fused = plan.full_size(pair[0].shape[-2])
        assert fused is not None
        sizes[plan.target] = fused
        if not shared:
            parts[name] = [None if size is None else [size.rank, size.alpha] for size in plan.sizes]
    by_key |= {f"{PREFIX}{key}": tensor.contiguous() for key, tensor in saved.items()}
    for key, tensor in by_key.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{target}: {key!r} has values that are not finite")
    modules = [plan.target for plan in plans if not plan.is_parameter]
    parameters = [plan.target for plan in plans if plan.is_parameter]
    names = {CONFIG_FILE, WEIGHTS_FILE, MODEL_CARD, *ASSETS}
    with replaced_export(target, names.__contains__, "a LoRA export") as folder:
        tied = tied_keys(adapter)
        saved_modules = outer_modules(key for key in saved if tied is None or key != tied[1])
        ties_weights = tied is not None and tied[0] in saved
        is_critic = adapter.args.is_critic
        fields = config_fields(sizes, modules, parameters, base, dropout, saved_modules, ties_weights, is_critic)
        write_json(folder / CONFIG_FILE, fields)
        metadata = {PARTS: json.dumps(parts)} if parts else None
        write_safetensors(folder / WEIGHTS_FILE, by_key, "export.tensor", metadata)
        if tokenizer is not None:
            assets = model_folder(base, CONFIG_FILES)
            copy_assets(folder, assets if assets.is_dir() else None, tokenizer)
