"""Bitwise conversion of weights between Hugging Face checkpoints, archon's `native` format and megatron-core's ranks.

Every source is presented as tensors under Hugging Face names that are read when they are written: one source tensor is
in memory at a time, and when exporting to Hugging Face one file of weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from archon.checkpoint.atomic import publish, staged_folder, sync_tree, write_errors, write_json
from archon.checkpoint.hf_export import copy_assets, require_zero_biases, save_hf
from archon.checkpoint.hf_reader import CONFIG_FILE, HFCheckpoint, checkpoint_folder, match_parameters, read_hf_config
from archon.checkpoint.megatron.rank_files import is_megatron_folder, open_ranks, write_ranks
from archon.checkpoint.megatron.sharding import MegatronLayout, RankTensors, padded_vocabulary
from archon.checkpoint.native import find_checkpoint, model_fingerprint, open_state, read_manifest, save_state
from archon.checkpoint.safetensors_file import LazyTensor, Region, fail
from archon.checkpoint.state_tree import Shard
from archon.checkpoint.tensor_reader import lazy_tensor
from archon.models import get_model_spec
from archon.models.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError, ConfigError

Format = Literal["hf", "native", "megatron"]
FORMATS: tuple[Format, ...] = get_args(Format)
VOCAB_MULTIPLE = 128
"""Megatron-LM's default of make_vocab_size_divisible_by."""


@dataclass(frozen=True)
class OpenWeights:
    """The weights of an open checkpoint.

    Attributes:
        hf_config: the Hugging Face config of the model.
        assets: the folder that holds the config and the tokenizer.
        adapter: maps between Hugging Face and native names.
        tensors: by Hugging Face key, in the order of the model's parameters.
    """

    hf_config: dict[str, Any]
    assets: Path
    adapter: BaseStateDictAdapter
    tensors: Mapping[str, LazyTensor]


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
) -> OpenWeights:
    """Write the weights of `source` to the new folder `target`, atomically.

    Args:
        to, origin: formats of `target` and `source`; None detects that of `source`.
        like: the Hugging Face folder with the config and the tokenizer; by default `source`. A native checkpoint has
            neither.
        layout: for `megatron`; by default one rank. Its `vocab_rows` is computed here.
        vocab_multiple: for `megatron`: the embedding is padded with zeros to a multiple of this times tp.
        dtype: for `hf`: dtype to convert the weights to; by default, and in the other formats, each keeps its own.
        drop_padding: for a `megatron` source: see `open_ranks`.

    A native source may be the checkpoint of a run; only its weights are used. A native target holds weights alone, and
    `ArchonEngine.load` reads it.

    Returns the converted weights, whose tensors can no longer be read. Raises CheckpointError, LayoutError or
    ConfigError before anything is written.
    """
    folder, destination = checkpoint_folder(source), Path(os.path.realpath(target))
    source_format = origin or detect_format(folder)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(
            f"{destination}: it exists and is not empty; expected a new folder: name another, or move it"
        )
    with open_weights(folder, source_format, like, drop_padding=drop_padding) as weights:
        if to == "hf":
            tensors = ((key, stored.read()) for key, stored in weights.tensors.items())
            save_hf(destination, tensors, weights.hf_config, like=weights.assets, dtype=dtype)
        elif to == "native":
            _write_folder(destination, lambda staged: write_state(staged, weights))
        else:
            rows = padded_vocabulary(weights.adapter.args.vocab_size, (layout or MegatronLayout()).tp, vocab_multiple)
            rank_tensors = RankTensors(weights.adapter, replace(layout or MegatronLayout(), vocab_rows=rows))

            def write(staged: Path) -> None:
                write_ranks(staged, rank_tensors, weights.tensors)
                write_json(staged / CONFIG_FILE, weights.hf_config)
                copy_assets(staged, weights.assets)

            _write_folder(destination, write)
    return weights


def detect_format(folder: Path) -> Format:
    """Returns the format of a checkpoint folder. Raises CheckpointError where it is none."""
    if is_megatron_folder(folder):
        return "megatron"
    if find_checkpoint(folder) is not None:
        return "native"
    if not (folder / CONFIG_FILE).is_file():
        fail(
            folder,
            f"it is not a checkpoint: expected {CONFIG_FILE} (hf), step-* folders (native) or mp_rank_* folders "
            "(megatron) in it",
        )
    return "hf"


def open_weights(
    folder: Path, format: Format, like: str | os.PathLike[str] | None = None, *, drop_padding: bool = False
) -> AbstractContextManager[OpenWeights]:
    """Returns a context manager of a checkpoint's weights, which can be read within its block; see `convert`.

    Raises CheckpointError unless the checkpoint holds exactly the model's tensors.
    """
    if format == "hf":
        if like is not None:
            raise ConfigError(
                f"{folder}: like (--like) was given for a hf checkpoint, which has its own config; leave it out"
            )
        return _open_hf(folder)
    if like is None and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder}: it holds no {CONFIG_FILE}; name the Hugging Face checkpoint of the same model by like (--like)"
        )
    assets = checkpoint_folder(like or folder)
    return _open_native(folder, assets) if format == "native" else _open_megatron(folder, assets, drop_padding)


def _adapter(hf_config: dict[str, Any], assets: Path, *, is_critic: bool = False) -> BaseStateDictAdapter:
    spec = get_model_spec(hf_config["model_type"])
    return spec.state_dict_adapter_class(hf_config, str(assets), is_critic=is_critic)


@contextmanager
def _open_hf(folder: Path) -> Iterator[OpenWeights]:
    hf_config = read_hf_config(folder)
    with HFCheckpoint(folder) as checkpoint:
        adapter = _adapter(hf_config, folder, is_critic="score.weight" in checkpoint.entries)
        with torch.device("meta"):
            model = adapter.model_class(adapter.args)
        match_parameters(checkpoint, model, adapter)
        tensors = {key: lazy_tensor(checkpoint.files[key], checkpoint.entries[key]) for key in adapter.hf_shapes()}
        yield OpenWeights(hf_config, folder, adapter, tensors)


@contextmanager
def _open_native(folder: Path, assets: Path) -> Iterator[OpenWeights]:
    found = find_checkpoint(folder)
    if found is None:
        fail(folder, "it is not a training checkpoint: it holds no step-* folder")
    hf_config = read_hf_config(assets)
    saved = read_manifest(found)["fingerprint"] or {}
    adapter = _adapter(hf_config, assets, is_critic=bool(saved.get("is_critic")))
    args = adapter.args
    if saved.get("balance_by_bias"):  # a Hugging Face config has no field for it
        args = replace(args, balance_by_bias=True)  # type: ignore[call-arg]
    with open_state(found, model_fingerprint(args)) as (_, state):
        model = _model_tensors(found, state, adapter)
        tensors: dict[str, LazyTensor] = {}
        for key in adapter.hf_shapes():
            target = adapter.hf_to_native(key)
            stored = model[target.name or ""]
            tensors[key] = stored if target.index is None else _expert(stored, target.index)
        yield OpenWeights(hf_config, assets, adapter, tensors)


def _expert(stack: LazyTensor, index: int) -> LazyTensor:
    """Returns the matrix of one expert in a parameter that stacks the experts."""
    return LazyTensor(stack.dtype, stack.shape[1:], lambda region: stack.read((slice(index, index + 1), *region))[0])


def _model_tensors(folder: Path, state: Mapping[str, Any], adapter: BaseStateDictAdapter) -> dict[str, LazyTensor]:
    """Returns the parameters of a state.

    Raises CheckpointError unless they are exactly the model's, in name and shape, and all balancing biases, which no
    other format can hold, are 0.
    """
    model = state["engine"]["model"] if "engine" in state and "model" in state["engine"] else {}
    biases = {name: stored for name, stored in model.items() if name.endswith("router.expert_bias")}
    for name, shape in adapter.native_shapes.items():
        if name not in model:
            fail(folder, f"parameter {name!r} is missing; was it saved by another program?")
        if model[name].shape != shape:
            fail(folder, f"parameter {name!r} has shape {list(model[name].shape)}, expected {list(shape)}")
    for name in model:
        if name not in adapter.native_shapes and name not in biases:
            fail(folder, f"parameter {name!r} is not part of this model; was --like the config of another one?")
    require_zero_biases([name for name, stored in biases.items() if bool(stored.read().any())])
    return {name: model[name] for name in adapter.native_shapes}


@contextmanager
def _open_megatron(folder: Path, assets: Path, drop_padding: bool) -> Iterator[OpenWeights]:
    hf_config = read_hf_config(assets)
    adapter = _adapter(hf_config, assets)
    with open_ranks(folder, adapter, drop_padding=drop_padding) as (_, tensors):
        yield OpenWeights(hf_config, assets, adapter, tensors)


def write_state(root: Path, weights: OpenWeights) -> None:
    """Write a native checkpoint of the weights alone, as step 0 in `root`."""
    adapter = weights.adapter
    keys: dict[str, list[str]] = {}
    for key in adapter.hf_shapes():
        keys.setdefault(adapter.hf_to_native(key).name or "", []).append(key)
    parameters = {
        name: _native_parameter(name, adapter.native_shapes[name], names, weights.tensors)
        for name, names in keys.items()
    }
    shards = {name: Shard.of(parameter) for name, parameter in parameters.items()}
    save_state(root, 0, {"engine": {"model": shards}}, fingerprint=model_fingerprint(adapter.args))


def _native_parameter(
    name: str, shape: tuple[int, ...], keys: Sequence[str], tensors: Mapping[str, LazyTensor]
) -> LazyTensor:
    """Returns a parameter, read from the Hugging Face tensor it equals or from those it stacks.

    Raises CheckpointError where the stacked tensors differ in dtype.
    """
    dtype = tensors[keys[0]].dtype
    for key in keys:
        if tensors[key].dtype != dtype:
            raise CheckpointError(
                f"{keys[0]!r} is {dtype} and {key!r} {tensors[key].dtype}, but both are part of parameter {name!r}; "
                "convert them to one dtype"
            )
    if tensors[keys[0]].shape == shape:
        return tensors[keys[0]]

    def load(region: Region) -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        for row, key in enumerate(keys):
            out[row] = tensors[key].read()
        return out[region]

    return LazyTensor(dtype, shape, load)


def _write_folder(target: Path, write: Callable[[Path], None]) -> None:
    with write_errors(target), staged_folder(target) as folder:
        write(folder)
        sync_tree(folder)
        publish(folder, target)
