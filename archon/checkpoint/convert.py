"""Weights moved, bit for bit, between Hugging Face checkpoints, archon's own (`native`) and ranks of megatron-core.

In the middle stand tensors under Hugging Face's names that are read when, and as far as, they are written: of a source
one tensor is in memory at a time, and of an export to Hugging Face one shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from archon.checkpoint.atomic import publish, staged_folder, sync_tree, write_json, writing
from archon.checkpoint.hf_export import copy_assets, refuse_moved_biases, save_hf
from archon.checkpoint.hf_reader import CONFIG_FILE, HFCheckpoint, existing_folder, match_parameters, read_hf_config
from archon.checkpoint.megatron.layout import MegatronLayout, Placement, padded_vocabulary
from archon.checkpoint.megatron.rank_files import is_megatron_folder, opened_ranks, write_ranks
from archon.checkpoint.native import model_fingerprint, opened_state, read_manifest, save_state, state_folder
from archon.checkpoint.safetensors_file import Deferred, SafetensorsFile, TensorEntry, refuse
from archon.checkpoint.state_file import StoredTensor, read_box
from archon.checkpoint.state_tree import Box, Part, Stored, box_shape, whole_box
from archon.models import get_model_spec
from archon.models.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError, ConfigError

Format = Literal["hf", "native", "megatron"]
FORMATS: tuple[Format, ...] = get_args(Format)
VOCAB_MULTIPLE = 128
"""Megatron-LM's own make_vocab_size_divisible_by."""


@dataclass(frozen=True)
class Weights:
    """A model's weights in an open checkpoint.

    Attributes:
        format: of the checkpoint.
        hf_config: the Hugging Face config that describes them.
        assets: the folder that has it, and the tokenizer.
        adapter: of the model.
        tensors: by Hugging Face key, in the model's order.
    """

    format: Format
    hf_config: dict[str, Any]
    assets: Path
    adapter: BaseStateDictAdapter
    tensors: Mapping[str, Stored]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Format,
    *,
    origin: Format | None = None,
    like: str | os.PathLike[str] | None = None,
    layout: MegatronLayout | None = None,
    vocab_multiple: int = VOCAB_MULTIPLE,
    dtype: torch.dtype | None = None,
    drop_padding: bool = False,
) -> Weights:
    """Write the weights of `source` to the new folder `target`, which appears whole or not at all.

    Args:
        to, origin: formats of `target` and `source`; the latter is found out where it is None.
        like: the Hugging Face folder that has the config and the tokenizer; by default `source`. A native one has none.
        layout: of `megatron`, by default one rank; its `vocab_rows` are computed.
        vocab_multiple: of `megatron`: the embedding is padded with zeros to a multiple of this times tp.
        dtype: of `hf`: convert the weights to it; by default each keeps its own, as in the other formats.
        drop_padding: of a `megatron` source: see `opened_ranks`.

    A native source may be a run's, of which only the weights are taken; as target it holds nothing else, and
    `ArchonEngine.load` reads it. Gives back what was moved, closed. Raises CheckpointError, LayoutError or ConfigError
    in one line; nothing has been written then.
    """
    folder, made = existing_folder(source), Path(os.path.realpath(target))
    kind = origin or find_format(folder)
    _require_new(made)
    with opened_weights(folder, kind, like, drop_padding=drop_padding) as weights:
        if to == "hf":
            whole = ((key, stored.read()) for key, stored in weights.tensors.items())
            save_hf(made, whole, weights.hf_config, like=weights.assets, dtype=dtype)
        elif to == "native":
            _write_folder(made, lambda staged: write_state(staged, weights))
        else:
            rows = padded_vocabulary(weights.adapter.args.vocab_size, (layout or MegatronLayout()).tp, vocab_multiple)
            placement = Placement(weights.adapter, replace(layout or MegatronLayout(), vocab_rows=rows))
            _write_folder(made, lambda staged: _write_megatron(staged, weights, placement))
    return weights


def find_format(folder: Path) -> Format:
    """The format of a checkpoint folder; CheckpointError where it is none."""
    if is_megatron_folder(folder):
        return "megatron"
    if state_folder(folder) is not None:
        return "native"
    if not (folder / CONFIG_FILE).is_file():
        refuse(
            folder,
            f"it is not a checkpoint: it holds neither {CONFIG_FILE} (hf), nor step-* folders (native), nor mp_rank_* "
            "folders (megatron)",
        )
    return "hf"


def opened_weights(
    folder: Path, kind: Format, like: str | os.PathLike[str] | None = None, *, drop_padding: bool = False
) -> AbstractContextManager[Weights]:
    """The weights of a checkpoint, every key accounted for, to be read within the block; see `convert`."""
    if kind == "hf":
        if like is not None:
            raise ConfigError(f"{folder}: like (--like) is for native and megatron; hf has a config of its own")
        return _opened_hf(folder)
    if like is None and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder}: it holds no {CONFIG_FILE}; name the Hugging Face checkpoint that it comes from by like (--like)"
        )
    assets = existing_folder(like or folder)
    return _opened_native(folder, assets) if kind == "native" else _opened_megatron(folder, assets, drop_padding)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of an open safetensors file."""

    file: SafetensorsFile
    entry: TensorEntry

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self, box: Box | None = None) -> Tensor:
        part = whole_box(self.shape) if box is None else box
        out = torch.empty(box_shape(part), dtype=self.dtype)
        read_box(self.file, self.entry, part, out)
        return out


@dataclass(frozen=True)
class StoredRow:
    """One expert's matrix of a stacked parameter."""

    stack: Stored
    row: int

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    def read(self, box: Box | None = None) -> Tensor:
        part = whole_box(self.shape) if box is None else box
        return self.stack.read((slice(self.row, self.row + 1), *part))[0]


def _adapter(hf_config: dict[str, Any], assets: Path, *, is_critic: bool = False) -> BaseStateDictAdapter:
    spec = get_model_spec(hf_config["model_type"])
    return spec.state_dict_adapter_class(hf_config, str(assets), is_critic=is_critic)


@contextmanager
def _opened_hf(folder: Path) -> Iterator[Weights]:
    hf_config = read_hf_config(folder)
    with HFCheckpoint(folder) as checkpoint:
        adapter = _adapter(hf_config, folder, is_critic="score.weight" in checkpoint.entries)
        with torch.device("meta"):
            model = adapter.model_class(adapter.args)
        match_parameters(checkpoint, model, adapter)
        tensors = {key: FileTensor(checkpoint.files[key], checkpoint.entries[key]) for key in adapter.hf_shapes()}
        yield Weights("hf", hf_config, folder, adapter, tensors)


@contextmanager
def _opened_native(folder: Path, assets: Path) -> Iterator[Weights]:
    found = state_folder(folder)
    if found is None:
        refuse(folder, "it is not a training checkpoint: it holds no step-* folder")
    hf_config = read_hf_config(assets)
    saved = read_manifest(found)["fingerprint"] or {}
    adapter = _adapter(hf_config, assets, is_critic=bool(saved.get("is_critic")))
    args = adapter.args
    if saved.get("balance_by_bias"):  # which a Hugging Face config cannot say
        args = replace(args, balance_by_bias=True)  # type: ignore[call-arg]
    with opened_state(found, model_fingerprint(args)) as (_, state):
        model = _model_of(found, state, adapter)
        tensors: dict[str, Stored] = {}
        for key in adapter.hf_shapes():
            target = adapter.hf_to_native(key)
            stored = model[target.name or ""]
            tensors[key] = stored if target.index is None else StoredRow(stored, target.index)
        yield Weights("native", hf_config, assets, adapter, tensors)


def _model_of(folder: Path, state: Mapping[str, Any], adapter: BaseStateDictAdapter) -> dict[str, StoredTensor]:
    """The parameters of a state, each of its shape and none else; balancing biases, which no other format can hold,
    must be 0."""
    model = state["engine"]["model"] if "engine" in state and "model" in state["engine"] else {}
    biases = {name: stored for name, stored in model.items() if name.endswith("router.expert_bias")}
    for name, shape in adapter.native_shapes.items():
        if name not in model:
            refuse(folder, f"parameter {name!r} is missing; was it saved by another program?")
        if model[name].shape != shape:
            refuse(folder, f"parameter {name!r} has shape {list(model[name].shape)}, expected {list(shape)}")
    for name in model:
        if name not in adapter.native_shapes and name not in biases:
            refuse(folder, f"parameter {name!r} is not part of this model")
    refuse_moved_biases([name for name, stored in biases.items() if bool(stored.read().any())])
    return {name: model[name] for name in adapter.native_shapes}


@contextmanager
def _opened_megatron(folder: Path, assets: Path, drop_padding: bool) -> Iterator[Weights]:
    hf_config = read_hf_config(assets)
    adapter = _adapter(hf_config, assets)
    with opened_ranks(folder, adapter, drop_padding=drop_padding) as (_, tensors):
        yield Weights("megatron", hf_config, assets, adapter, tensors)


def write_state(root: Path, weights: Weights) -> None:
    """Write a native checkpoint of the weights alone, as step 0 beneath `root`."""
    parts = {
        name: Part(stacked, stacked.shape, whole_box(stacked.shape))
        for name, stacked in native_tensors(weights.adapter, weights.tensors).items()
    }
    save_state(root, 0, {"engine": {"model": parts}}, fingerprint=model_fingerprint(weights.adapter.args))


def native_tensors(adapter: BaseStateDictAdapter, tensors: Mapping[str, Stored]) -> dict[str, Deferred]:
    """Every parameter of the model, made of Hugging Face tensors when it is written.

    Raises CheckpointError where the experts to be stacked differ in dtype.
    """
    rows: dict[str, list[str]] = {}
    for key in adapter.hf_shapes():
        rows.setdefault(adapter.hf_to_native(key).name or "", []).append(key)
    return {name: _native(name, adapter.native_shapes[name], keys, tensors) for name, keys in rows.items()}


def _native(name: str, shape: tuple[int, ...], keys: list[str], tensors: Mapping[str, Stored]) -> Deferred:
    dtype = tensors[keys[0]].dtype
    for key in keys:
        if tensors[key].dtype != dtype:
            raise CheckpointError(
                f"{keys[0]!r} is {dtype} and {key!r} {tensors[key].dtype}, but both are one tensor, {name!r}; "
                "give them one dtype"
            )

    def make() -> Tensor:
        if tensors[keys[0]].shape == shape:
            return tensors[keys[0]].read()
        out = torch.empty(shape, dtype=dtype)
        for row, key in enumerate(keys):
            out[row] = tensors[key].read()
        return out

    return Deferred(dtype, shape, make)


def _write_megatron(folder: Path, weights: Weights, placement: Placement) -> None:
    write_ranks(folder, placement, weights.tensors)
    write_json(folder / CONFIG_FILE, weights.hf_config)
    copy_assets(folder, weights.assets)


def _write_folder(target: Path, write: Callable[[Path], None]) -> None:
    with writing(target), staged_folder(target) as folder:
        write(folder)
        sync_tree(folder)
        publish(folder, target)


def _require_new(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: it exists; name a new folder for what is converted, or move it away")
