"""Read LoRAs from PEFT folders or training checkpoints, export them, and merge them into copies of weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archon.checkpoint.hf_io import checkpoint_digest, load_spec
from archon.checkpoint.hf_reader import HFCheckpoint
from archon.checkpoint.hub import CONFIG_FILES, checkpoint_folder, model_folder
from archon.checkpoint.native import find_checkpoint, model_fingerprint, open_state, read_manifest
from archon.checkpoint.peft.config import CONFIG_FILE
from archon.checkpoint.peft.reader import (
    read_base_layers,
    read_lora_tensors,
    read_peft_config,
    read_saved_tensors,
    read_sizes,
    require_base_layer,
)
from archon.checkpoint.peft.writer import ExpertFiles, save_lora
from archon.checkpoint.safetensors_file import LazyTensor, Region, fail
from archon.checkpoint.tokenizer import saved_tokenizer
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.lora.model import lora_parameter_names, magnitude_name, merged, single_lora_names
from archon.models.lora.targets import LoRASize
from archon.schema.config import require_separate
from archon.schema.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class LoRAWeights:
    """A LoRA: sizes by matrix name, and tensors by `lora.model.lora_parameter_names`.

    Attributes:
        stop_ids: ids that end an answer; None for the stop ids of the base model.
        modules: whole tensors of saved modules by native name; they replace the base's tensors of these names.
        base_layers: the base's embedding and head, if the folder has them; merging checks them.
    """

    sizes: Mapping[str, LoRASize]
    tensors: Mapping[str, Tensor]
    stop_ids: tuple[int, ...] | None = None
    modules: Mapping[str, Tensor] = field(default_factory=dict)
    base_layers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of parameters of the LoRA and of saved modules."""
        return sum(tensor.numel() for tensor in (*self.tensors.values(), *self.modules.values()))


def is_peft_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder or hub id holds a LoRA in PEFT's format."""
    return (model_folder(path, CONFIG_FILES) / CONFIG_FILE).is_file()


def base_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the base checkpoint that a PEFT folder names, a folder or a hub id.

    Raises:
        ConfigError: the base is not available, or `path` is a training checkpoint, which has only its digest.
    """
    base = read_peft_config(path).base if is_peft_folder(path) else None
    problem = "it does not name its base"
    if base is not None:
        try:
            checkpoint_folder(base, CONFIG_FILES)
            return Path(base)
        except CheckpointError as error:
            problem = f"its base is not available ({error})"
    raise ConfigError(f"{os.fspath(path)}: {problem}; set --base to the checkpoint that it was trained on")


def read_lora_weights(
    path: str | os.PathLike[str],
    adapter: BaseStateDictAdapter,
    base: str | os.PathLike[str] | None = None,
    lora_name: str | None = None,
) -> LoRAWeights:
    """Read the LoRA of a PEFT folder or of a training checkpoint.

    Args:
        path: the PEFT folder, checkpoint or run folder.
        adapter: adapter of the base model.
        base: Hugging Face checkpoint of the base model; a training checkpoint requires the same base.
        lora_name: name of the LoRA in a multi-LoRA run.

    Raises:
        CheckpointError: the LoRA belongs to another model or another base.
        ConfigError: `base` is missing, or `lora_name` does not fit.
    """
    if is_peft_folder(path):
        if lora_name is not None:
            raise ConfigError(f"{os.fspath(path)}: it holds one LoRA without a name; leave out {lora_name!r}")
        sizes = read_sizes(path, adapter)
        tensors, modules = read_lora_tensors(path, adapter, sizes), read_saved_tensors(path, adapter)
        return LoRAWeights(sizes, tensors, modules=modules, base_layers=read_base_layers(path, adapter))
    folder = find_checkpoint(path) or find_checkpoint(Path(path) / "checkpoints")
    if folder is None:
        fail(path, f"it holds no LoRA: neither {CONFIG_FILE} nor a training checkpoint")
    saved = read_manifest(folder)["fingerprint"] or {}
    if "adapters" not in saved:
        fail(folder, "it holds all weights of a model and no LoRA; archon convert --to hf writes them")
    if base is None:
        raise ConfigError(f"{folder}: its LoRA fits only the base that it was trained on; name the base checkpoint")
    expected = {**model_fingerprint(adapter.args), "adapters": saved["adapters"], "base": checkpoint_digest(base)}
    saved_modules = saved.get("modules_to_save", [])
    # A LoRA trained on a quantized base is merged into the original one.
    expected |= {name: saved[name] for name in ("modules_to_save", "quantize_base") if saved.get(name)}
    sizes = {name: LoRASize(**size) for name, size in _saved_sizes(folder, saved["adapters"], lora_name).items()}
    with open_state(folder, expected) as (_, state):
        stored = state["engine"]["model"]
        names = single_lora_names(sizes, lora_name)
        if missing := [name for name in (*names, *saved_modules) if name not in stored]:
            fail(folder, f"its LoRA lacks the tensor {missing[0]!r}, which its fingerprint lists")
        tensors = {alone: stored[name].read() for name, alone in names.items()}
        return LoRAWeights(sizes, tensors, modules={name: stored[name].read() for name in saved_modules})


def _saved_sizes(folder: Path, lora: Mapping[str, Any], lora_name: str | None) -> Mapping[str, Any]:
    """Return the sizes of the only LoRA in a training checkpoint, or of the LoRA `lora_name`."""
    names = sorted(name for name, sizes in lora.items() if "rank" not in sizes)
    if names and lora_name not in names:
        unknown = "" if lora_name is None else f", and no {lora_name!r}"
        raise ConfigError(f"{folder}: it holds LoRAs {', '.join(names)}{unknown}; choose one with archon export --name")
    if not names and lora_name is not None:
        raise ConfigError(f"{folder}: it holds one LoRA without a name; leave out {lora_name!r}")
    return lora if lora_name is None else lora[lora_name]


def export_lora(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    base: str | os.PathLike[str],
    experts: ExpertFiles = "stacked",
    lora_name: str | None = None,
) -> LoRAWeights:
    """Convert a LoRA to PEFT's format and return it; see `read_lora_weights` and `save_lora`."""
    require_separate(target, [path, base])
    adapter = load_spec(base).adapter
    lora = read_lora_weights(path, adapter, base, lora_name)
    if lora.base_layers:
        with HFCheckpoint(base) as checkpoint:
            stored = checkpoint.tensors(adapter)
            for name, tensor in lora.base_layers.items():
                weight = stored[adapter.hf_names(name)[0]].lazy(tensor.dtype, transposed=False)
                require_base_layer(path, name, tensor, weight.read())
    tokenizer = saved_tokenizer(path) or base
    dropout = read_peft_config(path).dropout if is_peft_folder(path) else next(iter(lora.sizes.values())).dropout
    options: dict[str, Any] = {"base": str(base), "experts": experts, "tokenizer": tokenizer, "dropout": dropout}
    save_lora(target, adapter, lora.sizes, lora.tensors, lora.modules, **options)
    return lora


def merge(
    parameters: Mapping[str, LazyTensor], lora: LoRAWeights, dtype: torch.dtype | None = None
) -> dict[str, LazyTensor]:
    """Return lazy parameters with LoRA and saved modules merged on read, in `dtype` or by default in their dtypes."""
    return {name: _merged(name, weight, lora, dtype or weight.dtype) for name, weight in parameters.items()}


def _merged(name: str, weight: LazyTensor, lora: LoRAWeights, dtype: torch.dtype) -> LazyTensor:
    def load(region: Region) -> Tensor:
        if name in lora.modules:
            return lora.modules[name][region].to(dtype)
        if name not in lora.sizes:
            return weight.read(region).to(dtype)
        if name in lora.base_layers:
            require_base_layer("the LoRA", name, lora.base_layers[name][region], weight.read(region))
        a, b = (lora.tensors[part] for part in lora_parameter_names(name))
        *experts, rows, columns = region
        if lora.sizes[name].dora:  # the norms are of whole rows
            magnitude, whole = lora.tensors[magnitude_name(name)][rows], weight.read((rows, slice(0, weight.shape[1])))
            return merged(whole, a, b[rows], lora.sizes[name].scale, dtype, magnitude)[:, columns]
        a, b = a[(*experts, slice(None), columns)], b[(*experts, rows)]
        return merged(weight.read(region), a, b, lora.sizes[name].scale, dtype)

    return LazyTensor(dtype, weight.shape, load, weight.by_rows)
