"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`, every key accounted for."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from archon.checkpoint.atomic import publish, staged_folder, sync_tree, undo_replacement, write_errors, write_json
from archon.checkpoint.safetensors_file import LazyTensor, SafetensorsFile, bytes_of, fail, write_safetensors
from archon.models.lora import AdapterSize, adaptable, adapter_names, hf_modules, matches
from archon.models.state_dict import BaseStateDictAdapter
from archon.parallel.control_plane import ControlPlane
from archon.parallel.fsdp import local_tensor, own_part
from archon.schema.config import regular_expression_error
from archon.schema.errors import CheckpointError, ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = ("lora_A", "lora_B")

# Fields that say how an adapter is applied, read below.
_READ = {"peft_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora"}
# Fields that say how it was made, or who may use it: they change nothing of a finished adapter.
_WITHOUT_EFFECT = {
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "lora_dropout",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "runtime_config",
    "eva_config",
    "lora_ga_config",
    "qalora_group_size",
    "ensure_weight_tying",
}
# Ways to begin that leave the base's weights as they are; others (PiSSA, OLoRA, LoftQ, CorDA) change them.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_OFF: tuple[Any, ...] = (None, False, "none", [], {})


def read_sizes(path: str | os.PathLike[str], adapter: BaseStateDictAdapter) -> dict[str, AdapterSize]:
    """Returns the adapters of a folder by the native name of their matrix.

    Raises CheckpointError for a field that this engine cannot honor, for a key that is no adapter of this model's
    linear layers, and for a pair with a missing half or the wrong shape.
    """
    folder = Path(path)
    config = read_adapter_config(folder)
    names = _names_of_modules(adapter)
    sizes: dict[str, AdapterSize] = {}
    with SafetensorsFile(folder / WEIGHTS_FILE) as file:
        for module, (a, b) in _pairs(file).items():
            if module not in names:
                fail(file.path, f"it adapts {module!r}, which is none of this model's linear layers; of another model?")
            out_features, in_features = adapter.native_shapes[names[module]]
            rank = a[0]
            if a != (rank, in_features) or b != (out_features, rank) or not rank:
                fail(
                    file.path,
                    f"the adapter of {module!r} has shapes {a} and {b}, expected [r, {in_features}] and "
                    f"[{out_features}, r]; of another model?",
                )
            expected = int(_by_pattern(config["rank_pattern"], module, config["r"]))
            if rank != expected:
                fail(file.path, f"the adapter of {module!r} has rank {rank}, and {CONFIG_FILE} says {expected}")
            alpha = float(_by_pattern(config["alpha_pattern"], module, config["lora_alpha"]))
            sizes[names[module]] = AdapterSize(rank, alpha, bool(config["use_rslora"]))
    return {name: sizes[name] for name in adaptable(adapter) if name in sizes}


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Returns a folder's `adapter_config.json`, with PEFT's defaults. Raises CheckpointError as `read_sizes` does."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        fail(folder, f"it has no {CONFIG_FILE}; expected the folder of an adapter that PEFT wrote")
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        fail(
            folder,
            f"it has no {WEIGHTS_FILE}"
            + (", and adapter_model.bin is a pickle, which is never read; save it as safetensors" if pickled else ""),
        )
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        fail(path, f"it is no JSON: {error}")
    if not isinstance(given, dict):
        fail(path, f"it holds a {type(given).__name__}; expected the fields of an adapter")
    config: dict[str, Any] = {"r": 8, "lora_alpha": 8, "use_rslora": False} | given
    for field in ("rank_pattern", "alpha_pattern"):
        config[field] = config.get(field) or {}
        if not isinstance(config[field], dict) or not all(map(_is_positive, config[field].values())):
            fail(path, f"{field} is {config[field]!r}; expected positive numbers by names of modules")
        for key in config[field]:
            if problem := regular_expression_error(key):
                fail(path, f"{field} has {key!r}, which is no regular expression: {problem}")
    if config.get("peft_type") != "LORA":
        fail(path, f"peft_type is {config.get('peft_type')!r}; expected 'LORA'")
    for field in ("r", "lora_alpha"):
        if not _is_positive(config[field]):
            fail(path, f"{field} is {config[field]!r}; expected a positive number")
    if config["use_rslora"] not in (True, False, None):
        fail(path, f"use_rslora is {config['use_rslora']!r}; expected true or false")
    if config.get("init_lora_weights") not in _PLAIN_BEGINNINGS:
        fail(
            path,
            f"init_lora_weights is {config['init_lora_weights']!r}, which changed the base's weights; convert it to a "
            "plain adapter with PEFT (save_pretrained's path_initial_model_for_weight_conversion)",
        )
    for field, value in config.items():
        if field not in _READ | _WITHOUT_EFFECT | {"init_lora_weights"} and value not in _OFF:
            fail(path, f"{field} is {value!r}, which archon does not have; expected it to be off")
    return config


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in pattern.items() if matches(key, module)), default)


def _names_of_modules(adapter: BaseStateDictAdapter) -> dict[str, str]:
    """Returns the native name of the matrix of each of Hugging Face's linear layers that is one matrix here as well."""
    names = {_peft_name(adapter, name): name for name in adaptable(adapter)}
    return {module: name for module, name in names.items() if module is not None}


def _peft_name(adapter: BaseStateDictAdapter, name: str) -> str | None:
    modules, targets = hf_modules(adapter, name), adapter.hf_to_native(adapter.hf_names(name)[0])
    alone = len(modules) == len(targets) == 1 and targets[0].index is None and targets[0].placement is None
    return modules[0] if alone else None


def require_peft_name(adapter: BaseStateDictAdapter, name: str) -> str:
    """Returns the module of Hugging Face's that holds a matrix. Raises ConfigError where it holds more than that, so
    that this version cannot write its adapter as PEFT does."""
    module = _peft_name(adapter, name)
    if module is None:
        raise ConfigError(
            f"lora.targets: the adapter of {name!r} cannot be written in PEFT's format, since the checkpoint holds the "
            f"matrix with others or by expert ({adapter.hf_names(name)[0]!r}); name targets without it"
        )
    return module


def _pairs(file: SafetensorsFile) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the shapes of A and B by module. Raises CheckpointError for another key, or one without its pair."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, entry in file.entries.items():
        module, _, part = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if key != _key(module, part) or part not in PARTS:
            fail(file.path, f"key {key!r} is no adapter of a linear layer; expected {_key('…', 'lora_A')} and lora_B")
        if not entry.dtype.is_floating_point or len(entry.shape) != 2:
            fail(file.path, f"key {key!r} is {entry.dtype} {entry.shape}; expected a matrix of floating-point numbers")
        found.setdefault(module, {})[part] = entry.shape
    for module, parts in found.items():
        if missing := [part for part in PARTS if part not in parts]:
            fail(file.path, f"key {_key(module, missing[0])!r} is missing")
    if not found:
        fail(file.path, "it holds no tensors")
    return {module: (parts["lora_A"], parts["lora_B"]) for module, parts in found.items()}


def _key(module: str, part: str) -> str:
    return f"{PREFIX}{module}.{part}.weight"


def read_adapter(
    path: str | os.PathLike[str], adapter: BaseStateDictAdapter, sizes: Mapping[str, AdapterSize]
) -> dict[str, Tensor]:
    """Returns a folder's adapters, of the sizes that `read_sizes` returned, by native name (`lora.adapter_names`).

    Raises CheckpointError for a value that is not finite.
    """
    tensors = {}
    with SafetensorsFile(Path(path) / WEIGHTS_FILE) as file:
        for name in sizes:
            for parameter, part in zip(adapter_names(name), PARTS, strict=True):
                entry = file.entries[_key(hf_modules(adapter, name)[0], part)]
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
                file.read_into(bytes_of(tensor), entry.start, f"key {entry.name!r}")
                # As float32, since adapters may be, and since 8-bit floats have no isfinite.
                if not tensor.float().isfinite().all():
                    fail(file.path, f"key {entry.name!r} has values that are not finite")
                tensors[parameter] = tensor
    return tensors


@torch.no_grad()
def load_adapter(
    path: str | os.PathLike[str], model: nn.Module, adapter: BaseStateDictAdapter, sizes: Mapping[str, AdapterSize]
) -> None:
    """Copy this rank's part of a folder's adapters into the model's; see `read_adapter`, which reads all first."""
    own = dict(model.named_parameters())
    for name, tensor in read_adapter(path, adapter, sizes).items():
        if name in own:  # else in another stage of the pipeline
            local_tensor(own[name]).copy_(tensor[own_part(own[name])])


def save_adapter(
    path: str | os.PathLike[str],
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str, AdapterSize],
    tensors: Mapping[str, Tensor],
    *,
    base: str,
) -> None:
    """Write adapters as PEFT does, from rank 0; a collective.

    Args:
        path: folder to create, or an earlier adapter to replace, in one step as exports of weights are.
        tensors: whole tensors by native name; see `ArchonEngine.adapter_weights`.
        base: path or name of the checkpoint that they belong to.

    Raises CheckpointError on every rank for an adapter that PEFT cannot hold, for a value that is not finite, and where
    the folder cannot be written or holds other files.
    """
    ranks = ControlPlane.patient("exports")
    target = Path(os.path.realpath(path))
    ranks.run_on_all(lambda: _write(target, adapter, sizes, tensors, base) if ranks.is_main else None)


def _write(
    target: Path,
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str, AdapterSize],
    tensors: Mapping[str, Tensor],
    base: str,
) -> None:
    modules = {name: require_peft_name(adapter, name) for name in sizes}
    by_key: dict[str, Tensor | LazyTensor] = {}
    for name in sizes:
        for parameter, part in zip(adapter_names(name), PARTS, strict=True):
            if not tensors[parameter].isfinite().all():
                raise CheckpointError(f"{target}: {parameter!r} has values that are not finite")
            by_key[_key(modules[name], part)] = tensors[parameter]
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        undo_replacement(target)
        for entry in sorted(target.iterdir()) if target.exists() else []:
            if entry.name not in (CONFIG_FILE, WEIGHTS_FILE):
                raise CheckpointError(
                    f"{target}: it holds {entry.name!r}, which is not part of an adapter and would be lost; choose "
                    "another folder, or move it away"
                )
        with staged_folder(target) as folder:
            write_json(folder / CONFIG_FILE, _config_of({modules[name]: size for name, size in sizes.items()}, base))
            write_safetensors(folder / WEIGHTS_FILE, by_key, "export.tensor")
            sync_tree(folder)
            publish(folder, target)


def _config_of(sizes: Mapping[str, AdapterSize], base: str) -> dict[str, Any]:
    """Returns the fields of `adapter_config.json` for adapters by module; the commonest rank and alpha are `r` and
    `lora_alpha`, and others are in the patterns."""
    rank, alpha = (_commonest([getattr(size, field) for size in sizes.values()]) for field in ("rank", "alpha"))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _integer(alpha),
        "use_rslora": next(iter(sizes.values())).rslora,
        "target_modules": sorted(sizes),
        "rank_pattern": {module: size.rank for module, size in sizes.items() if size.rank != rank},
        "alpha_pattern": {module: _integer(size.alpha) for module, size in sizes.items() if size.alpha != alpha},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _commonest(values: list[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _integer(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha
