"""Bitwise conversion of weights between Hugging Face checkpoints and the folders of training programs.

Supported: archon's `native` format, torch.distributed.checkpoint (`dcp`) and megatron-core rank files (`megatron`).

Every source is presented as lazy tensors under Hugging Face names: one source tensor is in memory at a time, or one
file of weights for an export to Hugging Face.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from archon.checkpoint.atomic import publish, staged_folder, sync_tree, write_errors, write_json
from archon.checkpoint.formats.dcp.folder import is_dcp_folder, open_dcp, write_dcp
from archon.checkpoint.formats.dcp.metadata import METADATA_FILE
from archon.checkpoint.formats.dcp.names import Names, match_names, named_tensors, target_scheme, write_marker
from archon.checkpoint.formats.gguf import GGUFType, write_gguf
from archon.checkpoint.formats.megatron.rank_files import is_megatron_folder, open_ranks, write_ranks
from archon.checkpoint.formats.megatron.sharding import MegatronLayout, RankTensors, padded_vocabulary
from archon.checkpoint.hf_export import copy_assets, require_zero_biases, save_hf
from archon.checkpoint.hf_io import config_dtype
from archon.checkpoint.hf_reader import HFCheckpoint, match_parameters, read_hf_config
from archon.checkpoint.hub import CONFIG_FILE, checkpoint_folder
from archon.checkpoint.native import find_checkpoint, model_fingerprint, open_state, read_manifest, save_state
from archon.checkpoint.other_folders import advice
from archon.checkpoint.peft.export import LoRAWeights, merge, read_lora_weights
from archon.checkpoint.safetensors_file import LazyTensor, Region, fail, full_region
from archon.checkpoint.state_tree import Shard
from archon.checkpoint.tokenizer import RUN_TOKENIZER, saved_tokenizer
from archon.models import get_model_spec
from archon.models.hf.quantization import without_quantization
from archon.models.hf.state_dict import BaseStateDictAdapter, NativeTarget
from archon.models.spec import is_text_decoder
from archon.schema.config import require_separate
from archon.schema.errors import CheckpointError, ConfigError

Format = Literal["hf", "native", "dcp", "megatron"]
FORMATS: tuple[Format, ...] = get_args(Format)
Target = Format | Literal["gguf"]
VOCAB_MULTIPLE = 128
"""Megatron-LM's default of make_vocab_size_divisible_by."""


@dataclass(frozen=True)
class OpenWeights:
    """The weights of an open checkpoint.

    Attributes:
        hf_config: the Hugging Face config of the model.
        assets: the folder of the config.
        tokenizer: the folder of the tokenizer; None for `assets`.
        adapter: maps between Hugging Face and native names.
        tensors: tensors by Hugging Face key, in the order of the model's parameters.
    """

    hf_config: dict[str, Any]
    assets: Path
    adapter: BaseStateDictAdapter
    tensors: Mapping[str, LazyTensor]
    tokenizer: Path | None = None


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Target,
    *,
    origin: Format | None = None,
    like: str | os.PathLike[str] | None = None,
    layout: MegatronLayout | None = None,
    vocab_multiple: int = VOCAB_MULTIPLE,
    dtype: torch.dtype | None = None,
    drop_padding: bool = False,
    names: Names | None = None,
    lora: str | os.PathLike[str] | None = None,
    lora_name: str | None = None,
    gguf_type: GGUFType = "f16",
) -> OpenWeights:
    """Write the weights of `source` to the new directory `target`, atomically.

    Args:
        source: folder of the weights. A native source may be the checkpoint of a run; only its weights are used.
        target: new or empty folder. A native target holds only weights; `ArchonEngine.load` reads it.
        to: format of `target`.
        origin: format of `source`; None detects it.
        like: Hugging Face folder with the config and the tokenizer; by default `source`. Required for a native source;
            its own tokenizer is written if it has one.
        layout: `megatron` layout; by default one rank. `vocab_rows` is computed here.
        vocab_multiple: for `megatron`: the embedding is padded with zeros to a multiple of this times tp.
        dtype: for `hf`: dtype of the written weights; by default, and for the other formats, dtypes are unchanged.
        drop_padding: for a `megatron` source: see `open_ranks`.
        names: naming scheme of a `dcp` target (by default `native`) or of a `dcp` source (by default detected).
        lora: LoRA to merge, one tensor in memory at a time, computed in float32: a PEFT folder, or the checkpoint of a
            run that trained LoRAs on the Hugging Face checkpoint `source`.
        lora_name: name of the LoRA in a multi-LoRA run.
        gguf_type: for `gguf`: the type of matrices.

    Returns:
        The converted weights; their tensors can no longer be read.

    Raises:
        CheckpointError: the source is invalid or the target exists. Nothing has been written, as for the other errors.
        LayoutError: the layout does not divide the model.
        ConfigError: an argument does not fit the source or the target.
    """
    folder, destination = checkpoint_folder(source), Path(os.path.realpath(target))
    source_format = origin or detect_format(folder)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(
            f"{destination}: it exists and is not empty; expected a new folder: name another, or move it"
        )
    require_separate(destination, [folder, like, lora])
    names_there = None if to == "dcp" else names
    with open_weights(folder, source_format, like, drop_padding=drop_padding, names=names_there) as weights:
        if lora is not None:
            base = folder if source_format == "hf" else None
            weights = _with_lora(weights, read_lora_weights(lora, weights.adapter, base, lora_name), dtype)
        if weights.adapter.args.n_mtp_layers and to != "hf":
            fail(
                folder,
                f"it holds trained multi-token-prediction layers, which the format {to} has no names for; convert it "
                "to hf",
            )
        if to == "hf":
            tensors = ((key, stored.read()) for key, stored in weights.tensors.items())
            text_only = is_text_decoder(weights.adapter.args, weights.hf_config["model_type"])
            tokenizer = saved_tokenizer(lora) or weights.tokenizer
            options: dict[str, Any] = {"tokenizer": tokenizer, "dtype": dtype, "text_only": text_only}
            options["adapter"] = weights.adapter if weights.adapter.args.n_mtp_layers else None
            save_hf(destination, tensors, weights.hf_config, like=weights.assets, **options)
        elif to == "native":
            _write_folder(destination, lambda staged: _write_native(staged, weights))
        elif to == "gguf":
            tokenizer, model_type = saved_tokenizer(lora) or weights.tokenizer, weights.hf_config["model_type"]
            source_of = tokenizer or weights.assets
            _write_folder(
                destination,
                lambda staged: write_gguf(staged, weights.tensors, weights.adapter, model_type, source_of, gguf_type),
            )
        elif to == "dcp":
            _write_dcp(destination, weights, names or "native")
        else:
            rows = padded_vocabulary(weights.adapter.args.vocab_size, (layout or MegatronLayout()).tp, vocab_multiple)
            rank_tensors = RankTensors(weights.adapter, replace(layout or MegatronLayout(), vocab_rows=rows))

            def write(staged: Path) -> None:
                write_ranks(staged, rank_tensors, weights.tensors)
                _write_config_and_assets(staged, weights)

            _write_folder(destination, write)
    return weights


def _with_lora(weights: OpenWeights, lora: LoRAWeights, dtype: torch.dtype | None) -> OpenWeights:
    """Return weights with LoRA and saved modules merged on read; other tensors are unchanged."""
    family, names = weights.adapter, {*lora.sizes, *lora.modules}
    changed = [key for key in weights.tensors if any(x.name in names for x in family.hf_to_native(key))]
    merged = _hf_tensors(merge(_parameters(family, weights.tensors), lora, dtype), family)
    return replace(weights, tensors={**weights.tensors, **{key: merged[key] for key in changed}})


def detect_format(folder: Path) -> Format:
    """Return the format of a checkpoint folder; raise CheckpointError if it is none."""
    if is_megatron_folder(folder):
        return "megatron"
    if is_dcp_folder(folder):
        return "dcp"
    if find_checkpoint(folder) is not None:
        return "native"
    if not (folder / CONFIG_FILE).is_file():
        fail(
            folder,
            f"it is not a checkpoint: expected {CONFIG_FILE} (hf), step-* folders (native), {METADATA_FILE} (dcp) or "
            f"mp_rank_* folders (megatron) in it; {advice(folder)}",
        )
    return "hf"


def open_weights(
    folder: Path,
    format: Format,
    like: str | os.PathLike[str] | None = None,
    *,
    drop_padding: bool = False,
    names: Names | None = None,
) -> AbstractContextManager[OpenWeights]:
    """Open a checkpoint's weights for reading within the block; see `convert` for the arguments.

    Quantized weights of a hf checkpoint are dequantized to the dtype of its config.

    Raises:
        CheckpointError: the checkpoint does not hold exactly the model's tensors.
    """
    if format == "hf":
        if like is not None:
            raise ConfigError(
                f"{folder}: like (--like) is set for a hf checkpoint, which already has a config; leave it out"
            )
        return _open_hf(folder)
    if like is None and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder}: it holds no {CONFIG_FILE}; set like (--like) to a Hugging Face checkpoint of the same model"
        )
    assets = checkpoint_folder(like or folder)
    if format == "dcp":
        return _open_dcp(folder, assets, names)
    return _open_native(folder, assets) if format == "native" else _open_megatron(folder, assets, drop_padding)


def _adapter(
    hf_config: dict[str, Any], assets: Path, *, is_critic: bool = False, text_only: bool = False
) -> BaseStateDictAdapter:
    spec = get_model_spec(hf_config["model_type"], text_only=text_only)
    adapter = spec.state_dict_adapter_class(hf_config, str(assets), is_critic=is_critic)
    adapter.require_map("archon convert")
    return adapter


@contextmanager
def _open_hf(folder: Path) -> Iterator[OpenWeights]:
    hf_config = read_hf_config(folder)
    with HFCheckpoint(folder) as checkpoint:
        adapter = _adapter(hf_config, folder, is_critic="score.weight" in checkpoint.entries)
        with torch.device("meta"):
            model = adapter.model_class(adapter.args)
        match_parameters(checkpoint, model, adapter)
        reader = adapter.for_keys(checkpoint.entries)
        stored, dtype = checkpoint.tensors(reader), config_dtype(hf_config)
        tensors = {
            key: stored[key].lazy(dtype, transposed=reader.hf_to_native(key)[0].is_transposed)
            for key in reader.hf_shapes()
        }
        if reader is not adapter:
            tensors = _hf_tensors(_parameters(reader, tensors), adapter)
        yield OpenWeights(hf_config, folder, adapter, tensors)


@contextmanager
def _open_native(folder: Path, assets: Path) -> Iterator[OpenWeights]:
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        fail(folder, "it is not a training checkpoint: it holds no step-* folder")
    hf_config = read_hf_config(assets)
    saved = read_manifest(checkpoint)["fingerprint"] or {}
    if "adapters" in saved:
        fail(
            checkpoint, "it holds only LoRAs; archon export writes them in PEFT's format or merges them into their base"
        )
    text = get_model_spec(hf_config["model_type"], text_only=True).model_args_class
    text_only = saved.get("family") == text.__name__
    adapter = _adapter(hf_config, assets, is_critic=bool(saved.get("is_critic")), text_only=text_only)
    if saved.get("n_mtp_layers"):
        with HFCheckpoint(assets) as checkpoint_of_config:
            adapter = adapter.with_mtp(checkpoint_of_config.entries.keys())
    args = adapter.args
    if saved.get("balance_by_bias"):  # a Hugging Face config has no field for it
        args = replace(args, balance_by_bias=True)
    with open_state(checkpoint, model_fingerprint(args)) as (_, state):
        model = _model_tensors(checkpoint, state, adapter)
        yield OpenWeights(hf_config, assets, adapter, _hf_tensors(model, adapter), saved_tokenizer(checkpoint))


def _hf_tensors(parameters: Mapping[str, LazyTensor], adapter: BaseStateDictAdapter) -> dict[str, LazyTensor]:
    """Return Hugging Face tensors, assembled from the model's parameters on read."""
    return {key: _hf_tensor(shape, adapter.hf_to_native(key), parameters) for key, shape in adapter.hf_shapes().items()}


@contextmanager
def _open_dcp(folder: Path, assets: Path, names: Names | None) -> Iterator[OpenWeights]:
    hf_config = read_hf_config(assets)
    with open_dcp(folder) as stored:
        is_critic = any(name == "score.weight" or name.endswith(".score.weight") for name in stored)
        adapter = _adapter(hf_config, assets, is_critic=is_critic)
        scheme, matched = match_names(folder, stored, adapter, hf_config["model_type"], names)
        tensors = matched if scheme.names == "hf" else _hf_tensors(matched, adapter)
        yield OpenWeights(hf_config, assets, adapter, tensors)


def _write_dcp(target: Path, weights: OpenWeights, names: Names) -> None:
    scheme = target_scheme(names, weights.adapter, weights.hf_config["model_type"])
    tensors = weights.tensors if names == "hf" else _parameters(weights.adapter, weights.tensors)
    tensors = named_tensors(scheme, tensors, weights.adapter)

    def write(staged: Path) -> None:
        write_dcp(staged, tensors)
        write_marker(staged, names)
        _write_config_and_assets(staged, weights)

    _write_folder(target, write)


def _write_config_and_assets(folder: Path, weights: OpenWeights) -> None:
    config = without_quantization(weights.hf_config)
    write_json(folder / CONFIG_FILE, config)
    copy_assets(folder, weights.assets, weights.tokenizer)


def _hf_tensor(
    shape: tuple[int, ...], targets: Sequence[NativeTarget], parameters: Mapping[str, LazyTensor]
) -> LazyTensor:
    """Return a Hugging Face tensor, assembled from its parameters on read.

    Raises:
        CheckpointError: the parameters differ in dtype.
    """
    parts = [parameters[target.name] for target in targets]
    if all(target.placement is None for target in targets):
        (stored,), (target,) = parts, targets
        return stored if target.index is None else _row(stored, target.index)
    dtype = _common_dtype({target.name: part for target, part in zip(targets, parts, strict=True)}, "one tensor")

    def load(region: Region) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        for target, part in zip(targets, parts, strict=True):
            assert target.placement is not None
            target.placement.insert((part if target.index is None else _row(part, target.index)).read(), tensor)
        return tensor[region]

    return LazyTensor(dtype, shape, load)


def _row(stack: LazyTensor, index: int) -> LazyTensor:
    """Return one expert's matrix of a stacked parameter."""
    return LazyTensor(stack.dtype, stack.shape[1:], lambda region: stack.read((slice(index, index + 1), *region))[0])


def _common_dtype(tensors: Mapping[str, LazyTensor], result: str) -> torch.dtype:
    """Return the dtype of all tensors; raise CheckpointError, naming `result`, if they differ."""
    (first, dtype), *remaining = ((name, tensor.dtype) for name, tensor in tensors.items())
    for name, other in remaining:
        if other != dtype:
            raise CheckpointError(
                f"{first!r} is {dtype} and {name!r} {other}, but both are part of {result}; convert them to one dtype"
            )
    return dtype


def _model_tensors(folder: Path, state: Mapping[str, Any], adapter: BaseStateDictAdapter) -> dict[str, LazyTensor]:
    """Return the parameters of a state.

    Raises:
        CheckpointError: names or shapes differ from the model's, or a balancing bias that only the native format
            stores is not 0.
    """
    model = state["engine"]["model"] if "engine" in state and "model" in state["engine"] else {}
    expected = adapter.stored_shapes
    biases = {
        name: stored for name, stored in model.items() if name.endswith("router.expert_bias") and name not in expected
    }
    for name, shape in expected.items():
        if name not in model:
            fail(folder, f"parameter {name!r} is missing; was the checkpoint saved by another program?")
        if model[name].shape != shape:
            fail(folder, f"parameter {name!r} has shape {list(model[name].shape)}, expected {list(shape)}")
    for name in model:
        if name not in expected and name not in biases:
            fail(folder, f"parameter {name!r} is not part of this model; does --like name another model?")
    require_zero_biases([name for name, stored in biases.items() if bool(stored.read().any())])
    return {name: model[name] for name in expected}


@contextmanager
def _open_megatron(folder: Path, assets: Path, drop_padding: bool) -> Iterator[OpenWeights]:
    hf_config = read_hf_config(assets)
    adapter = _adapter(hf_config, assets)
    with open_ranks(folder, adapter, drop_padding=drop_padding) as (_, tensors):
        yield OpenWeights(hf_config, assets, adapter, tensors)


def _write_native(folder: Path, weights: OpenWeights) -> None:
    write_state(folder, weights)
    if weights.tokenizer is not None:
        shutil.copytree(weights.tokenizer, folder / RUN_TOKENIZER)


def write_state(root: Path, weights: OpenWeights) -> None:
    """Write a native checkpoint with only the weights, as step 0 in `root`."""
    shards = {
        name: Shard.from_value(parameter) for name, parameter in _parameters(weights.adapter, weights.tensors).items()
    }
    save_state(root, 0, {"engine": {"model": shards}}, fingerprint=model_fingerprint(weights.adapter.args))


def _parameters(adapter: BaseStateDictAdapter, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the model's parameters by name, read from Hugging Face tensors."""
    sources: dict[str, dict[str, NativeTarget]] = {}
    for key in adapter.hf_shapes():
        for target in adapter.hf_to_native(key):
            sources.setdefault(target.name, {})[key] = target
    return {
        name: _native_parameter(name, adapter.stored_shapes[name], targets, tensors)
        for name, targets in sources.items()
    }


def _native_parameter(
    name: str, shape: tuple[int, ...], targets: Mapping[str, NativeTarget], tensors: Mapping[str, LazyTensor]
) -> LazyTensor:
    """Return a parameter, read from the Hugging Face tensors `targets` that hold it or its rows.

    Raises:
        CheckpointError: the tensors differ in dtype.
    """
    dtype = _common_dtype({key: tensors[key] for key in targets}, f"parameter {name!r}")
    (key, target), *remaining = targets.items()
    if not remaining and target.index is None and target.placement is None:
        return tensors[key]

    def load(region: Region) -> Tensor:
        rows, *inner = region
        out = torch.empty(rows.stop - rows.start, *shape[1:], dtype=dtype)
        for key, target in targets.items():
            tensor = tensors[key]
            if target.index is not None:
                if rows.start <= target.index < rows.stop:
                    out[target.index - rows.start].copy_(target.extract(tensor.read()))
            elif target.placement is not None and target.placement.dim > 0 and len(shape) > 2:
                # The stack and the parameter have the same rows.
                out.copy_(target.extract(tensor.read((rows, *full_region(tensor.shape[1:])))))
            else:
                out.copy_(target.extract(tensor.read())[rows])
        return out[:, *inner]

    return LazyTensor(dtype, shape, load)


def _write_folder(target: Path, write: Callable[[Path], None]) -> None:
    with write_errors(target), staged_folder(target) as folder:
        write(folder)
        sync_tree(folder)
        publish(folder, target)
