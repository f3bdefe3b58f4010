"""Read LoRAs in PEFT's format: a config and `adapter_model.safetensors`. Every key must be used."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from archon.checkpoint.hub import model_folder
from archon.checkpoint.peft.config import CONFIG_FILE, PeftConfig, read_config
from archon.checkpoint.peft.layout import (
    BASE_LAYER,
    PREFIX,
    TEXT_MODEL,
    Pair,
    PeftTensor,
    is_reversed,
    key_pairs,
    magnitude_key,
    peft_tensors,
)
from archon.checkpoint.safetensors_file import SafetensorsFile, fail
from archon.checkpoint.tensor_reader import lazy_tensor
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.lora.model import lora_parameter_names, magnitude_name, single_lora_names
from archon.models.lora.saved_modules import VALUE_HEAD, resolve_saved_modules, tied_keys, whole_adapter
from archon.models.lora.targets import EMBEDDING, HEAD, VISION_PREFIX, LoRASize, lora_matrices, require_untied
from archon.parallel.fsdp import local_region, local_tensor
from archon.schema.errors import ConfigError
from archon.schema.name_patterns import name_suffixes

WEIGHTS_FILE = "adapter_model.safetensors"
PARTS = "archon.parts"
"""Metadata key for ranks and alphas of the matrices in a fused tensor, which PEFT's format lacks."""


@dataclass(frozen=True)
class _Stored:
    """The stored LoRA of a tensor.

    Attributes:
        tensor: the adapted tensor.
        keys: keys of A and B.
        sizes: sizes of the parts, None without a LoRA.
        shared: whether the parts share A.
        reversed: see `is_reversed`.
    """

    tensor: PeftTensor
    keys: tuple[str, str]
    sizes: tuple[LoRASize | None, ...]
    shared: bool
    reversed: bool

    def parts(self, pair: Pair) -> list[Pair | None]:
        """Split stored A and B into the LoRAs of the parts; raise ValueError like `split`."""
        ranks = None if self.shared else [0 if size is None else size.rank for size in self.sizes]
        return self.tensor.split(self.tensor.from_file(pair, is_reversed=self.reversed), ranks)


def read_sizes(path: str | os.PathLike[str], adapter: BaseStateDictAdapter) -> dict[str, LoRASize]:
    """Return the LoRA sizes of a folder or hub id by native matrix name.

    Raises:
        CheckpointError: a config field is not supported, a key is no LoRA of this model's linear layers, or A or B is
            missing or has the wrong shape.
    """
    with _open(path) as (config, file):
        return _sizes(_stored(config, file, adapter), adapter, file.path)


def read_peft_config(path: str | os.PathLike[str]) -> PeftConfig:
    """Read the config of a folder or hub id; raise CheckpointError like `read_sizes`."""
    folder = model_folder(path)
    if not os.path.lexists(folder / CONFIG_FILE):  # reading a pipe or a broken link names it
        inside = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG_FILE}"))[:5]
        hint = f"; it has LoRA folders, name one: {', '.join(inside)}" if inside else ""
        fail(folder, f"it has no {CONFIG_FILE}; expected a LoRA folder in PEFT's format{hint}")
    if not os.path.lexists(folder / WEIGHTS_FILE):
        pickled = (folder / "adapter_model.bin").exists()
        fail(
            folder,
            f"it has no {WEIGHTS_FILE}"
            + (
                ", and adapter_model.bin is a pickle, which is never read; save it as safetensors"
                if pickled
                else "; copy that file into the folder"
            ),
        )
    return read_config(folder / CONFIG_FILE)


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[tuple[PeftConfig, SafetensorsFile]]:
    """Open a folder or hub id: its config and its tensors."""
    config = read_peft_config(path)
    with SafetensorsFile(model_folder(path) / WEIGHTS_FILE) as file:
        yield config, file


def _stored(config: PeftConfig, file: SafetensorsFile, adapter: BaseStateDictAdapter) -> list[_Stored]:
    """Return the LoRAs of an open file, after checking keys and shapes."""
    matrices = lora_matrices(adapter)
    in_memory = peft_tensors(adapter.in_memory, matrices)
    known = [*(peft_tensors(adapter, matrices) | in_memory).values()]
    # PEFT adapts the linear layers of transformers' model, which stacks experts.
    linear = [tensor for tensor in in_memory.values() if tensor.experts is None]
    if not any(TEXT_MODEL in key for key in file.entries):  # the LoRA of a plain text decoder
        known = [tensor.in_text_model for tensor in known]
        linear = [tensor.in_text_model for tensor in linear if not tensor.parts[0].name.startswith(VISION_PREFIX)]
    excluded = (EMBEDDING, HEAD) if config.all_linear else ()
    required = {x.name for x in linear if config.names(x.name) and x.parts[0].name not in excluded}
    modules = [tensor for tensor in known if tensor.experts is None]
    stacks = [tensor for tensor in known if tensor.experts is not None and config.is_parameter(tensor.name)]
    keys = key_pairs([*modules, *stacks])
    expected = {key for pair in keys.values() for key in pair}
    magnitudes = {magnitude_key(tensor): tensor for tensor in modules if config.dora}
    saved = _saved_keys(config, file, adapter).keys() | _base_layers(file, adapter).keys()
    for key, entry in file.entries.items():
        if key in saved:
            continue
        if key in magnitudes:
            _check_magnitudes(file, key, magnitudes[key], keys[magnitudes[key].name])
            continue
        if key not in expected:
            fail(
                file.path,
                f"key {key!r} is no LoRA of this model's linear layers" + _stack_hint(key, known, config, adapter),
            )
        if not entry.dtype.is_floating_point or len(entry.shape) != 2:
            fail(file.path, f"key {key!r} is {entry.dtype} {entry.shape}; expected a matrix of floating-point numbers")
    if not file.entries:
        fail(file.path, "it holds no tensors")
    _require_parameters(config, [*known, *linear, *in_memory.values()])
    parts = _read_parts(file)
    for name in parts.keys() - keys.keys():
        fail(file.path, f"its metadata {PARTS!r} has {name!r}, which has no LoRA in the file")
    stored = []
    for tensor in [*modules, *stacks]:
        missing = [key for key in keys[tensor.name] if key not in file.entries]
        if len(missing) == 1 or (missing and tensor.experts is not None):
            fail(file.path, f"key {missing[0]!r} is missing")
        if missing and tensor.name in required:
            fail(
                file.path,
                f"it has no LoRA of {tensor.name!r}, which target_modules of {CONFIG_FILE} names; is the file "
                "incomplete, or the LoRA of another model?",
            )
        if not missing:
            _require_supported(config, file, adapter, tensor)
            stored.append(_stored_tensor(config, file, tensor, keys[tensor.name], parts.get(tensor.name)))
    return stored


def _saved_keys(config: PeftConfig, file: SafetensorsFile, adapter: BaseStateDictAdapter) -> dict[str, str]:
    """Return the key in transformers' model of each tensor of `modules_to_save`, by the key in the file.

    The tensors of a module must all be there, in the shapes of the model.
    """
    try:
        names = resolve_saved_modules(adapter, config.saved_modules, {}, strict=False)
    except ConfigError as error:
        fail(config.path, str(error))
    memory, tied = whole_adapter(adapter), tied_keys(adapter)
    shapes = memory.hf_shapes()
    if adapter.args.is_critic and any("score".endswith(name) for name in config.saved_modules):
        names = (*names, VALUE_HEAD)
    keys = list(dict.fromkeys(key for name in names for key in memory.hf_names(name)))
    if tied is not None and tied[0] in keys:
        if not config.ties_weights:
            fail(
                config.path,
                "modules_to_save has the embedding or the head, which the base ties, and ensure_weight_tying is not "
                "true: PEFT trained two matrices; train it with ensure_weight_tying=True, or untie the base first",
            )
        keys.append(tied[1])
        shapes[tied[1]] = shapes[tied[0]]
    is_text = not any(TEXT_MODEL in key for key in file.entries)  # see `_stored`
    saved = {PREFIX + (key.replace(TEXT_MODEL, ".", 1) if is_text else key): key for key in keys}
    for stored, key in saved.items():
        entry = file.entries.get(stored)
        if entry is None:
            fail(file.path, f"key {stored!r} is missing, and modules_to_save of {CONFIG_FILE} names its module")
        if not entry.dtype.is_floating_point or entry.shape != shapes[key]:
            fail(
                file.path,
                f"key {stored!r} is {entry.dtype} {entry.shape}; expected {shapes[key]} floating-point numbers",
            )
    return saved


def _base_layers(file: SafetensorsFile, adapter: BaseStateDictAdapter) -> dict[str, str]:
    """Return the native name of the base's embedding and head in a file, by key; PEFT stores them next to a LoRA."""
    names = {f"{PREFIX}{adapter.in_memory.hf_names(x)[0]}": x for x in (EMBEDDING, HEAD) if x in adapter.native_shapes}
    names |= {name.replace(TEXT_MODEL, ".", 1): native for name, native in names.items()}
    keys = {name.removesuffix(".weight") + BASE_LAYER: native for name, native in names.items()}
    found = {key: native for key, native in keys.items() if key in file.entries}
    for key, native in found.items():
        entry = file.entries[key]
        if not entry.dtype.is_floating_point or entry.shape != adapter.native_shapes[native]:
            fail(
                file.path,
                f"key {key!r} is {entry.dtype} {entry.shape}; expected {adapter.native_shapes[native]} floating-point "
                "numbers: a resized vocabulary needs a resized base",
            )
    return found


def read_base_layers(path: str | os.PathLike[str], adapter: BaseStateDictAdapter) -> dict[str, Tensor]:
    """Return the base's embedding and head in a folder by native name, for `require_base_layer`."""
    with _open(path) as (_, file):
        return {native: _read(file, key) for key, native in _base_layers(file, adapter).items()}


def require_base_layer(path: Any, name: str, stored: Tensor, weight: Tensor) -> None:
    """Raise CheckpointError if a stored weight differs from the base's, in the narrower dtype of the two."""
    narrow = min(stored.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    if not torch.equal(stored.to(weight.device, narrow), weight.to(narrow)):
        fail(
            path,
            f"its copy of the base's {name!r} differs from the base; write the changed base with PEFT's "
            "get_base_model().save_pretrained, and use it as the base",
        )


def read_saved_modules(path: str | os.PathLike[str], adapter: BaseStateDictAdapter) -> tuple[str, ...]:
    """Return the native names of the parameters that a folder stores whole, after checking their keys and shapes."""
    with _open(path) as (config, file):
        saved = _saved_keys(config, file, adapter)
    names = {target.name for key in saved.values() for target in whole_adapter(adapter).hf_to_native(key)}
    return tuple(name for name in adapter.native_shapes if name in names and name != VALUE_HEAD)


def read_saved_tensors(path: str | os.PathLike[str], adapter: BaseStateDictAdapter) -> dict[str, Tensor]:
    """Return the tensors of `modules_to_save` by native name.

    Raises:
        CheckpointError: a value is not finite, or the matrices of a tied embedding and head differ.
    """
    with _open(path) as (config, file):
        tensors = {key: _read(file, stored) for stored, key in _saved_keys(config, file, adapter).items()}
        tied = tied_keys(adapter)
        if tied is not None and tied[0] in tensors and not torch.equal(*(tensors[key] for key in tied)):
            fail(file.path, f"{tied[1]!r} differs from {tied[0]!r}, and ensure_weight_tying of {CONFIG_FILE} is true")
    return {
        target.name: target.extract(tensor)
        for key, tensor in tensors.items()
        for target in whole_adapter(adapter).hf_to_native(key)
    }


def _require_supported(
    config: PeftConfig, file: SafetensorsFile, adapter: BaseStateDictAdapter, tensor: PeftTensor
) -> None:
    """Fail for DoRA without support or magnitudes, and for a LoRA of a tied embedding."""
    is_outer = tensor.parts[0].name in (EMBEDDING, HEAD)
    if config.dora and tensor.experts is not None:
        fail(file.path, f"use_dora of {CONFIG_FILE} is true, and {tensor.name!r} stacks experts, which have no DoRA")
    if config.dora and is_outer:
        fail(file.path, f"use_dora of {CONFIG_FILE} is true, and DoRA of {tensor.name!r} is not supported")
    if config.dora and magnitude_key(tensor) not in file.entries:
        fail(file.path, f"key {magnitude_key(tensor)!r} is missing, and use_dora of {CONFIG_FILE} is true")
    try:
        if is_outer:
            require_untied(adapter, tensor.name)
    except ConfigError as error:
        fail(file.path, str(error))


def _require_parameters(config: PeftConfig, tensors: Iterable[PeftTensor]) -> None:
    """Raise CheckpointError if a name of `target_parameters` is no parameter of the model."""
    names = [tensor.name if tensor.experts is not None else f"{tensor.name}.weight" for tensor in tensors]
    suffixes = {suffix for name in names for suffix in name_suffixes(name)}
    if unknown := sorted(config.parameters - suffixes):
        stacks = sorted(
            {tensor.name.rpartition(".layers.")[2].partition(".")[2] for tensor in tensors if tensor.experts}
        )
        fail(
            config.path,
            f"target_parameters names {', '.join(unknown[:4])}, which the model does not have; expected "
            + (f"its stacked experts, {', '.join(stacks)}" if stacks else "none, because the model stacks no experts"),
        )


def _check_magnitudes(file: SafetensorsFile, key: str, tensor: PeftTensor, keys: tuple[str, str]) -> None:
    """Fail if the DoRA magnitudes of a linear layer have another shape or dtype, or no LoRA."""
    entry = file.entries[key]
    if not entry.dtype.is_floating_point or entry.shape != (tensor.out_features,):
        fail(
            file.path,
            f"key {key!r} is {entry.dtype} {entry.shape}; expected {(tensor.out_features,)} floating-point numbers",
        )
    if keys[0] not in file.entries:
        fail(file.path, f"key {keys[0]!r} is missing, and {key!r} is there")


def _stack_hint(key: str, known: Iterable[PeftTensor], config: PeftConfig, adapter: BaseStateDictAdapter) -> str:
    """Return a hint for the error about an unknown key."""
    if key.endswith(".lora_magnitude_vector") and not config.dora:
        return f": use_dora of {CONFIG_FILE} is not true"
    if (
        key.removeprefix(PREFIX) in adapter.in_memory.to_hf_map.values()
        or key.removeprefix(PREFIX) in adapter.hf_shapes()
    ):
        return f", but a weight of the base, and modules_to_save of {CONFIG_FILE} does not name its module"
    stacks = [tensor for tensor in known if tensor.experts is not None and key.startswith(f"{PREFIX}{tensor.module}.")]
    if stacks and not any(config.is_parameter(stack.name) for stack in stacks):
        return f": target_parameters of {CONFIG_FILE} lacks all of {', '.join(stack.name for stack in stacks)}"
    return "; of another model?"


def _stored_tensor(
    config: PeftConfig, file: SafetensorsFile, tensor: PeftTensor, keys: tuple[str, str], parts: Any
) -> _Stored:
    """Return the stored LoRA of a tensor, after checking its shapes and the ranks of its parts."""
    size = config.size(tensor)
    swapped = tensor.experts is not None and is_reversed(config.version, transposed=tensor.transposed)
    shapes = tuple(file.entries[key].shape for key in keys)
    rank, remainder = divmod(shapes[0][0], tensor.experts or 1)
    if remainder or not rank or shapes != tensor.shapes(rank, is_reversed=swapped):
        a, b = tensor.shapes(size.rank, is_reversed=swapped)
        version = ".".join(map(str, config.version))
        layout = "" if tensor.experts is None else f", as PEFT {version} stacks experts (peft_version in {CONFIG_FILE})"
        fail(
            file.path,
            f"the LoRA of {tensor.name!r} has shapes {shapes[0]} and {shapes[1]}, expected {a} and {b}{layout}; of "
            "another model?",
        )
    if rank != size.rank:
        fail(file.path, f"the LoRA of {tensor.name!r} has rank {rank}, but {CONFIG_FILE} says {size.rank}")
    shared = parts is None
    sizes = (size,) * len(tensor.parts) if shared else _sizes_of_parts(file.path, tensor, size, parts)
    return _Stored(tensor, keys, sizes, shared, swapped)


def _read_parts(file: SafetensorsFile) -> dict[str, Any]:
    text = file.metadata.get(PARTS, "{}")
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(file.path, f"its metadata {PARTS!r} is not JSON: {error}")
    if not isinstance(parts, dict):
        fail(file.path, f"its metadata {PARTS!r} holds a {type(parts).__name__}; expected the parts of tensors by name")
    return parts


def _sizes_of_parts(path: Any, tensor: PeftTensor, fused: LoRASize, parts: Any) -> tuple[LoRASize | None, ...]:
    """Parse the metadata of a fused tensor's parts: [rank, alpha] each, or null."""
    sizes: tuple[LoRASize | None, ...] = ()
    if isinstance(parts, list) and all(part is None or _is_size(part) for part in parts):
        sizes = tuple(None if part is None else LoRASize(part[0], float(part[1]), fused.rslora) for part in parts)
    present = [size for size in sizes if size is not None]
    sizes = tuple(None if size is None else replace(size, dora=fused.dora) for size in sizes)
    fits = len(sizes) == len(tensor.parts) and sum(size.rank for size in present) == fused.rank
    fits = fits and not (fused.dora and len(present) < len(sizes))  # the magnitudes are of all parts
    if not fits or not all(math.isclose(size.scale, fused.scale, rel_tol=1e-9) for size in present):
        fail(
            path,
            f"its metadata {PARTS!r} has {parts!r} for {tensor.name!r}; expected [rank, alpha] of each of its "
            f"{len(tensor.parts)} matrices, with ranks that add up to {fused.rank} and the scale {fused.scale:g}",
        )
    return sizes


def _is_size(part: Any) -> bool:
    return (
        isinstance(part, list)
        and len(part) == 2
        and type(part[0]) is int
        and type(part[1]) in (int, float)
        and 0 < part[0] < 2**31
        and 0 < part[1] < 2**31
    )


def _sizes(
    stored: Sequence[_Stored], adapter: BaseStateDictAdapter, path: str | os.PathLike[str]
) -> dict[str, LoRASize]:
    """Return the LoRA size of each matrix; the LoRAs of all its experts must have one size."""
    sizes: dict[str, LoRASize] = {}
    places: dict[str, dict[int | None, str]] = {}
    for item in stored:
        for target, size in zip(item.tensor.parts, item.sizes, strict=True):
            if size is None:
                continue
            rows = places.setdefault(target.name, {})
            if None in rows or (rows and target.index is None):
                fail(path, f"it has LoRAs of {[*rows.values(), item.tensor.name]}, which hold the same weights")
            rows[target.index] = item.tensor.name
            if sizes.setdefault(target.name, size) != size:
                fail(
                    path,
                    f"the LoRA of {item.tensor.name!r} has rank {size.rank} and alpha {size.alpha:g}, but "
                    f"{next(iter(rows.values()))!r} has {sizes[target.name].rank} and {sizes[target.name].alpha:g}; "
                    "expected the same for all experts of a layer",
                )
    for name, rows in places.items():
        experts = adapter.native_shapes[name][0]
        if None not in rows and len(rows) < experts:
            missing = next(row for row in range(experts) if row not in rows)
            fail(
                path,
                f"it has no LoRA of {adapter.hf_names(name)[missing].removesuffix('.weight')!r}, but LoRAs of other "
                "experts of the layer; expected LoRAs of all experts or of none",
            )
    return {name: sizes[name] for name in lora_matrices(adapter) if name in sizes}


def read_lora_tensors(
    path: str | os.PathLike[str], adapter: BaseStateDictAdapter, sizes: Mapping[str, LoRASize]
) -> dict[str, Tensor]:
    """Return the LoRA tensors of a folder by `lora.model.lora_parameter_names`; `sizes` is from `read_sizes`.

    Raises:
        CheckpointError: a value is not finite.
    """
    with _open(path) as (config, file):
        stored = _stored(config, file, adapter)
        pairs, magnitudes = _read_pairs(file, stored), _read_magnitudes(file, stored)
    by_matrix = {name: dict(zip(lora_parameter_names(name), pairs[name], strict=True)) for name in sizes}
    return {name: tensor for pair in by_matrix.values() for name, tensor in pair.items()} | magnitudes


@torch.no_grad()
def load_lora(
    path: str | os.PathLike[str],
    model: nn.Module,
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str, LoRASize],
    lora_name: str | None = None,
) -> None:
    """Copy this rank's part of a folder's LoRA and saved modules into the model, after reading all tensors.

    `lora_name` selects the destination in a multi-LoRA model.
    """
    parameters, tensors = dict(model.named_parameters()), read_lora_tensors(path, adapter, sizes)
    sources = single_lora_names(sizes, lora_name)
    if modules := read_saved_tensors(path, adapter):
        tensors |= modules
        sources |= {name: name for name in modules}
        if adapter.is_tied and "tok_embeddings.weight" in modules:
            sources["output.weight"] = "tok_embeddings.weight"  # of a pipeline's last stage
    for name, stored in read_base_layers(path, adapter).items():
        if name in parameters:
            parameter = parameters[name].detach()
            require_base_layer(path, name, stored[local_region(parameter)], local_tensor(parameter))
    for name, source in sources.items():
        if name in parameters:  # otherwise it is in another pipeline stage
            local_tensor(parameters[name]).copy_(tensors[source][local_region(parameters[name])])


def _read_pairs(file: SafetensorsFile, stored: Sequence[_Stored]) -> dict[str, Pair]:
    """Return the LoRAs of an open file by native matrix name."""
    pairs: dict[str, Pair] = {}
    rows: dict[str, dict[int, Pair]] = {}
    for item in stored:
        pair = _read(file, item.keys[0]), _read(file, item.keys[1])
        try:
            parts = item.parts(pair)
        except ValueError as error:
            fail(file.path, f"its metadata {PARTS!r} does not fit {item.keys[1]!r}: {error}")
        for target, part in zip(item.tensor.parts, parts, strict=True):
            if part is not None and target.index is None:
                pairs[target.name] = part
            elif part is not None and target.index is not None:
                rows.setdefault(target.name, {})[target.index] = part
    for name, by_row in rows.items():
        ordered = [by_row[row] for row in sorted(by_row)]
        pairs[name] = (torch.stack([a for a, _ in ordered]), torch.stack([b for _, b in ordered]))
    return pairs


def _read_magnitudes(file: SafetensorsFile, stored: Sequence[_Stored]) -> dict[str, Tensor]:
    """Return the DoRA magnitudes of an open file by parameter name."""
    magnitudes: dict[str, Tensor] = {}
    for item in stored:
        if any(size is not None and size.dora for size in item.sizes):
            parts = item.tensor.split_magnitudes(_read(file, magnitude_key(item.tensor)))
            magnitudes |= {magnitude_name(t.name): part for t, part in zip(item.tensor.parts, parts, strict=True)}
    return magnitudes


def _read(file: SafetensorsFile, key: str) -> Tensor:
    tensor = lazy_tensor(file, file.entries[key]).read()
    # As float32, since LoRAs may be float32 and FP8 dtypes have no isfinite.
    if not tensor.float().isfinite().all():
        fail(file.path, f"key {key!r} has values that are not finite")
    return tensor
