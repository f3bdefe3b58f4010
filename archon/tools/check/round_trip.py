"""Checkpoint round trips: names as in transformers, and bitwise equal weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from archon.checkpoint.hf_io import load_model, save_model
from archon.models import BaseArchonModel, BaseStateDictAdapter, get_model_spec
from archon.tools.check.oracle import (
    ContractError,
    build_pair,
    checkpoint_tensors,
    draw_slow_decays,
    family_config,
    random_config,
    randomize_vectors,
)
from archon.tools.check.random_configs import draw_fields

# Exported as released, which every reader accepts. transformers 5 transposes the experts of the first and renames the
# layers of the second, and reads both forms.
EXPORTED_AS_RELEASED = frozenset({"qwen3_vl_moe", "kimi_k25"})


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors in a checkpoint folder, by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _require_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], label: str) -> None:
    if actual.keys() != expected.keys():
        raise ContractError(f"{label}: only one side has tensors {sorted(actual.keys() ^ expected.keys())[:4]}")
    for name, tensor in expected.items():
        if actual[name].dtype != tensor.dtype or not torch.equal(actual[name], tensor):
            raise ContractError(f"{label}: {name} is not bitwise equal")


def _require_conversions(adapter: BaseStateDictAdapter, native: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Check that `to_hf`, and an overridden `convert_single_to_hf`, undo `from_hf`."""
    stored = {name: tensor for name, tensor in native.items() if name in adapter.stored_shapes}
    _require_equal(dict(adapter.to_hf(dict(stored))), tensors, "to_hf")
    if "convert_single_to_hf" in adapter.overrides:
        singles = dict(pair for item in stored.items() for pair in adapter.convert_single_to_hf(*item))
        _require_equal(singles, tensors, "convert_single_to_hf")


def round_trip(seed: int, model_type: str, folder: Path, reference: str | None = None) -> int:
    """Load a checkpoint of transformers and write it again; return its number of tensors.

    Raises:
        ContractError: names, shapes or a bit differ.
    """
    config = random_config(seed, model_type, reference)
    hf_model, _, adapter = build_pair(config, seed=seed, model_type=model_type)
    tensors = checkpoint_tensors(hf_model, adapter=adapter)
    if model_type in EXPORTED_AS_RELEASED:
        tensors = adapter.to_hf(adapter.from_hf(tensors))
    if (shapes := {name: tuple(tensor.shape) for name, tensor in tensors.items()}) != adapter.hf_shapes():
        wrong = sorted(name for name, _ in shapes.items() ^ adapter.hf_shapes().items())
        raise ContractError(f"names or shapes of {wrong[:4]} differ from transformers' checkpoint")
    native = adapter.from_hf(tensors)
    _require_conversions(adapter, native, tensors)
    source = folder / "source"
    hf_model.save_pretrained(source)
    (source / "config.json").write_text(json.dumps(family_config(config, model_type)))
    loaded = load_model(source, dtype=torch.float32, text_only=True)
    _require_equal(dict(loaded.named_parameters()), {name: native[name] for name in adapter.native_shapes}, "loaded")
    save_model(loaded, folder / "copy", like=source)
    written, files = folder_tensors(folder / "copy"), folder_tensors(source)
    if model_type in EXPORTED_AS_RELEASED:
        reader = adapter.for_keys(files)
        kept = {adapter.passthrough_name(k, reader): x for k, x in files.items() if reader.is_passthrough(k)}
        files = kept | tensors
    _require_equal(written, files, "files")
    return len(written)


def fresh_checkpoint(
    folder: Path, config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> BaseArchonModel:
    """Write a checkpoint of random weights for a config; return its model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = fresh_model(config, seed, dtype)
    save_model(model, folder / "weights", like=folder, passthrough=False)
    return model


def fresh_model(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> BaseArchonModel:
    """Return a model of a config with random weights and, if it has decays, slow ones."""
    spec = get_model_spec(config["model_type"], text_only=True)
    model = spec.model_class(spec.model_args_class.from_hf_config(config)).to(dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.init_weights()
        randomize_vectors(model)
        draw_slow_decays(model)
    model.init_buffers("cpu")
    return model


TWO_DIGITS = {"num_hidden_layers": 11, "num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12}
"""Sizes with two-digit indices, which a conversion that sorts names as text puts in the wrong order."""


def native_round_trip(seed: int, model_type: str, folder: Path, **sizes: int) -> int:
    """Write fresh weights, load them, and write them again; return the number of tensors.

    For families that transformers lacks, and for handwritten conversions.

    Args:
        seed: seed of the configuration and the weights.
        model_type: type of the family.
        folder: folder of the checkpoints.
        **sizes: values of config fields; fields that the family lacks are ignored.

    Raises:
        ContractError: a bit differs.
    """
    args_class = get_model_spec(model_type, text_only=True).model_args_class
    known = {*args_class.hf_fields, *args_class.hf_examples}
    fixed: dict[str, Any] = {name: size for name, size in sizes.items() if name in known}
    config = {"model_type": model_type} | draw_fields(seed, model_type, **fixed)
    model = fresh_checkpoint(folder, config, seed)
    loaded = load_model(folder / "weights", dtype=torch.float32)
    adapter = get_model_spec(model_type).state_dict_adapter_class(config)
    tensors = folder_tensors(folder / "weights")
    _require_conversions(adapter, adapter.from_hf(tensors), tensors)
    _require_equal(dict(loaded.named_parameters()), dict(model.named_parameters()), "loaded")
    save_model(loaded, folder / "copy", like=folder, passthrough=False)
    written = folder_tensors(folder / "copy")
    _require_equal(written, tensors, "files")
    return len(written)
