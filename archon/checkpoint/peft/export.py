"""LoRAs outside of training: read from a PEFT directory or the checkpoint of a run, and merged during export.

The weights that receive a LoRA are a copy; nothing is ever unmerged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archon.checkpoint.hf_io import checkpoint_digest
from archon.checkpoint.hf_reader import read_hf_config
from archon.checkpoint.native import find_checkpoint, model_fingerprint, open_state, read_manifest
from archon.checkpoint.peft.config import CONFIG_FILE
from archon.checkpoint.peft.reader import read_lora_tensors, read_peft_config, read_sizes
from archon.checkpoint.peft.writer import ExpertFiles, save_lora
from archon.checkpoint.safetensors_file import LazyTensor, Region, fail
from archon.models import get_model_spec
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.lora.model import lora_parameter_names, merged, single_lora_names
from archon.models.lora.targets import LoRASize
from archon.schema.errors import ConfigError


@dataclass(frozen=True)
class LoRAWeights:
    """LoRAs of a model: sizes by matrix name, and tensors by `lora.model.lora_parameter_names`."""

    sizes: Mapping[str, LoRASize]
    tensors: Mapping[str, Tensor]

    @property
    def parameters(self) -> int:
        """Number of LoRA parameters."""
        return sum(tensor.numel() for tensor in self.tensors.values())


def is_peft_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds a LoRA in PEFT's format."""
    return (Path(path) / CONFIG_FILE).is_file()


def base_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the base checkpoint in the config of a PEFT directory.

    Raises:
        ConfigError: it is not a directory here, or `path` is a run's checkpoint, which stores only a base digest.
    """
    base = read_peft_config(Path(path)).base if is_peft_folder(path) else None
    if base is None or not Path(base).is_dir():
        base_field = f"its base {base!r} is not a directory here" if base else "it does not name its base"
        raise ConfigError(f"{os.fspath(path)}: {base_field}; pass the base checkpoint with --base")
    return Path(base)


def read_lora_weights(
    path: str | os.PathLike[str],
    adapter: BaseStateDictAdapter,
    base: str | os.PathLike[str] | None = None,
    lora_name: str | None = None,
) -> LoRAWeights:
    """Return the LoRAs of a PEFT directory, or of the checkpoint of a LoRA run.

    Args:
        path: PEFT directory, or checkpoint of a run.
        adapter: state-dict adapter of their model.
        base: Hugging Face checkpoint of that model, which must be the base of a run's checkpoint.
        lora_name: LoRA of a multi-LoRA run.

    Raises:
        CheckpointError: the LoRAs belong to another model or another base.
    """
    if is_peft_folder(path):
        if lora_name is not None:
            raise ConfigError(f"{os.fspath(path)}: it contains a single LoRA without a name; leave out {lora_name!r}")
        sizes = read_sizes(path, adapter)
        return LoRAWeights(sizes, read_lora_tensors(path, adapter, sizes))
    folder = find_checkpoint(path) or find_checkpoint(Path(path) / "checkpoints")
    if folder is None:
        fail(path, f"no LoRA: neither {CONFIG_FILE} nor a checkpoint of a run")
    saved = read_manifest(folder)["fingerprint"] or {}
    if "adapters" not in saved:
        fail(folder, "it contains whole weights, not LoRAs; archon convert --to hf writes them")
    if base is None:
        raise ConfigError(f"{folder}: its LoRAs fit only the base they were trained on; pass the base checkpoint")
    expected = {**model_fingerprint(adapter.args), "adapters": saved["adapters"], "base": checkpoint_digest(base)}
    sizes = {name: LoRASize(**size) for name, size in _saved_sizes(folder, saved["adapters"], lora_name).items()}
    with open_state(folder, expected) as (_, state):
        stored = state["engine"]["model"]
        names = single_lora_names(sizes, lora_name)
        if missing := [name for name in names if name not in stored]:
            fail(folder, f"LoRA tensor {missing[0]!r} is missing")
        return LoRAWeights(sizes, {alone: stored[name].read() for name, alone in names.items()})


def _saved_sizes(folder: Path, lora: Mapping[str, Any], lora_name: str | None) -> Mapping[str, Any]:
    """Return the LoRA sizes in a run's checkpoint, of the only LoRA or of `lora_name`."""
    several = sorted(name for name, of in lora.items() if "rank" not in of)
    if several and lora_name not in several:
        unknown = "" if lora_name is None else f", not {lora_name!r}"
        raise ConfigError(
            f"{folder}: it contains LoRAs {', '.join(several)}{unknown}; choose one with archon export --name"
        )
    if not several and lora_name is not None:
        raise ConfigError(f"{folder}: it contains a single LoRA without a name; leave out {lora_name!r}")
    return lora if lora_name is None else lora[lora_name]


def export_lora(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    base: str | os.PathLike[str],
    experts: ExpertFiles = "stacked",
    lora_name: str | None = None,
) -> LoRAWeights:
    """Write the LoRAs of a run's checkpoint or of a PEFT directory as PEFT does, and return them.

    Raises errors as `read_lora_weights` and `save_lora` do.
    """
    hf_config = read_hf_config(base)
    adapter = get_model_spec(hf_config["model_type"]).state_dict_adapter_class(hf_config, os.fspath(base))
    weights = read_lora_weights(path, adapter, base, lora_name)
    save_lora(target, adapter, weights.sizes, weights.tensors, base=os.fspath(base), experts=experts)
    return weights


def merge(
    parameters: Mapping[str, LazyTensor], lora: LoRAWeights, dtype: torch.dtype | None = None
) -> dict[str, LazyTensor]:
    """Return parameters by name, merged with their LoRAs on reading.

    Args:
        parameters: base parameters by native name.
        lora: LoRAs by native name.
        dtype: dtype of the results; by default each parameter's dtype.
    """
    return {name: _merged(name, weight, lora, dtype or weight.dtype) for name, weight in parameters.items()}


def _merged(name: str, weight: LazyTensor, lora: LoRAWeights, dtype: torch.dtype) -> LazyTensor:
    def load(region: Region) -> Tensor:
        if name not in lora.sizes:
            return weight.read(region).to(dtype)
        a, b = (lora.tensors[part] for part in lora_parameter_names(name))
        *experts, rows, columns = region
        a, b = a[(*experts, slice(None), columns)], b[(*experts, rows)]
        return merged(weight.read(region), a, b, lora.sizes[name].scale, dtype)

    return LazyTensor(dtype, weight.shape, load, weight.by_rows)
