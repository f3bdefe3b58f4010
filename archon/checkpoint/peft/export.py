"""Adapters outside of training: read from a folder of PEFT's or from a run's checkpoint, and merged into weights while
these are written, tensor by tensor. The weights that they are merged into are a copy; none is ever unmerged.
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
    """Adapters of a model: their sizes by the name of the matrix, and their tensors by
    `lora.model.lora_parameter_names`.
    """

    sizes: Mapping[str, LoRASize]
    tensors: Mapping[str, Tensor]

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())


def is_peft_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds an adapter in PEFT's format."""
    return (Path(path) / CONFIG_FILE).is_file()


def base_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a folder of PEFT's names as its base.

    Raises ConfigError where that is no folder here, and for a run's checkpoint, which names its base by a digest alone.
    """
    base = read_peft_config(Path(path)).base if is_peft_folder(path) else None
    if base is None or not Path(base).is_dir():
        base_field = f"names its base {base!r}, which is no folder here" if base else "does not say where its base is"
        raise ConfigError(f"{os.fspath(path)}: it {base_field}; name the checkpoint that it adapts by --base")
    return Path(base)


def read_lora_weights(
    path: str | os.PathLike[str],
    adapter: BaseStateDictAdapter,
    base: str | os.PathLike[str] | None = None,
    lora_name: str | None = None,
) -> LoRAWeights:
    """Return the adapters of a folder of PEFT's, or of a checkpoint of a run that trained adapters.

    Args:
        adapter: of the model that they belong to.
        base: the Hugging Face checkpoint of that model; a run's checkpoint is only read for the base it was trained on.
        lora_name: which adapter of a run that trained several.

    Raises CheckpointError where they are none of this model's, or of another base.
    """
    if is_peft_folder(path):
        if lora_name is not None:
            raise ConfigError(f"{os.fspath(path)}: it holds one adapter without a name; leave out {lora_name!r}")
        sizes = read_sizes(path, adapter)
        return LoRAWeights(sizes, read_lora_tensors(path, adapter, sizes))
    folder = find_checkpoint(path) or find_checkpoint(Path(path) / "checkpoints")
    if folder is None:
        fail(path, f"it holds no adapter: neither {CONFIG_FILE} nor a checkpoint of a run")
    saved = read_manifest(folder)["fingerprint"] or {}
    if "adapters" not in saved:
        fail(folder, "it holds all weights of a model and no adapters; archon convert --to hf writes them")
    if base is None:
        raise ConfigError(f"{folder}: only the base that it was trained on can take its adapters; name its checkpoint")
    expected = {**model_fingerprint(adapter.args), "adapters": saved["adapters"], "base": checkpoint_digest(base)}
    sizes = {name: LoRASize(**size) for name, size in _saved_sizes(folder, saved["adapters"], lora_name).items()}
    with open_state(folder, expected) as (_, state):
        stored = state["engine"]["model"]
        names = single_lora_names(sizes, lora_name)
        if missing := [name for name in names if name not in stored]:
            fail(folder, f"its adapters lack a tensor {missing[0]!r}, whose size it names")
        return LoRAWeights(sizes, {alone: stored[name].read() for name, alone in names.items()})


def _saved_sizes(folder: Path, lora: Mapping[str, Any], lora_name: str | None) -> Mapping[str, Any]:
    """Return the sizes of the adapter that a run's checkpoint holds, or of the one with this name."""
    several = sorted(name for name, of in lora.items() if "rank" not in of)
    if several and lora_name not in several:
        given = "" if lora_name is None else f", and none {lora_name!r}"
        raise ConfigError(
            f"{folder}: it holds adapters {', '.join(several)}{given}; choose one by archon export --name"
        )
    if not several and lora_name is not None:
        raise ConfigError(f"{folder}: it holds one adapter without a name; leave out {lora_name!r}")
    return lora if lora_name is None else lora[lora_name]


def export_lora(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    base: str | os.PathLike[str],
    experts: ExpertFiles = "stacked",
    lora_name: str | None = None,
) -> LoRAWeights:
    """Write the adapters of a run's checkpoint, or of a folder of PEFT's, as PEFT does. Returns them.

    Raises errors as `read_lora_weights` and `save_lora` do.
    """
    hf_config = read_hf_config(base)
    adapter = get_model_spec(hf_config["model_type"]).state_dict_adapter_class(hf_config, os.fspath(base))
    found = read_lora_weights(path, adapter, base, lora_name)
    save_lora(target, adapter, found.sizes, found.tensors, base=os.fspath(base), experts=experts)
    return found


def merge(
    parameters: Mapping[str, LazyTensor], lora: LoRAWeights, dtype: torch.dtype | None = None
) -> dict[str, LazyTensor]:
    """Return parameters by name, those with an adapter merged when they are read.

    Args:
        dtype: of the results; by default each parameter keeps its own.
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
