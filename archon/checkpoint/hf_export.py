"""Atomic export to a Hugging Face checkpoint folder."""

from __future__ import annotations

import fnmatch
import functools
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from archon.checkpoint.atomic import kill_point, replaced_export, write_json
from archon.checkpoint.hf_reader import (
    INDEX_FILE,
    WEIGHT_DTYPES,
    WEIGHTS_FILE,
    HFCheckpoint,
    config_dtype,
    read_hf_config,
)
from archon.checkpoint.hub import CONFIG_FILE, checkpoint_folder
from archon.checkpoint.safetensors_file import LazyTensor, write_safetensors
from archon.checkpoint.tokenizer import GENERATION_CONFIG_FILE, NAMED_TEMPLATES, TOKENIZER_FILES, write_tokenizer
from archon.models import get_model_spec
from archon.models.hf.quantization import without_quantization
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.moe import expert_biases
from archon.parallel.comm import Group, all_reduce
from archon.parallel.control_plane import ControlPlane
from archon.schema.errors import CheckpointError

# Image and video processors.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
ASSETS = (GENERATION_CONFIG_FILE, *TOKENIZER_FILES, NAMED_TEMPLATES, *PROCESSOR_FILES)
"""Names that `copy_assets` writes."""
MODEL_CARD = "README.md"
"""Card that a run writes into its export."""
MAX_SHARD_BYTES = 5 * 10**9
ExportDtype = torch.dtype | Literal["like"] | None
"""See `save_hf`."""


def save_hf(
    path: str | os.PathLike[str],
    weights: Iterable[tuple[str, Tensor]],
    hf_config: Mapping[str, Any] | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    dtype: ExportDtype = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    passthrough: bool | str | os.PathLike[str] = True,
    text_only: bool = False,
    adapter: BaseStateDictAdapter | None = None,
) -> None:
    """Write a checkpoint that transformers can load: weights, index, config, generation config and tokenizer.

    Args:
        path: folder to create, or an earlier export to replace.
        weights: (Hugging Face name, tensor) pairs, each name once, on any device and in any layout; only one shard of
            them is in memory at a time.
        hf_config: the config to write; by default the config of `like`. Its dtype fields are set to the weights' dtype.
        like: checkpoint folder with the config, generation config and tokenizer files to copy. May be `path`.
        tokenizer: a tokenizer, or its folder, to save instead of the files of `like`.
        dtype: dtype to convert the parameters to, or "like" for each tensor's dtype in the checkpoint `like`; by
            default they keep their dtypes, as buffers always do. Parameters in full precision, such as the decays of
            delta nets, are converted too: transformers' models have one dtype (their `_keep_in_fp32_modules` do not
            name decays), so its `save_pretrained` writes them in it.
        max_shard_bytes: bytes of data in a shard; a larger tensor gets a separate shard.
        passthrough: copy the passthrough keys of the family's adapter bitwise from `like`, or from this folder. False
            leaves them out, for a model that was not loaded from a checkpoint. Quantized tensors become weights of the
            export's dtype: without a `quantization_config` no reader would apply their scales.
        text_only: the weights are the text decoder of a vision-language model; the vision encoder is passed through.
        adapter: the adapter that made `weights`, if the model has MTP layers; by default the config's adapter.

    Everything is written and synced in a hidden folder next to `path`. One rename (or exchange with an earlier export)
    makes it visible: a kill at any moment leaves either the earlier export or the new one.

    Raises:
        CheckpointError: names or shapes differ from the config's model, a value is not finite, passthrough keys have
            no source, `path` holds files that are not part of an export, or it cannot be written. `path` is unchanged.
    """
    if hf_config is None and like is None:
        raise CheckpointError(f"{path}: neither hf_config nor like is set; set one to select the model's config")
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; expected at least 1")
    if isinstance(dtype, torch.dtype) and dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"{path}: dtype is {dtype}; expected torch.float64, float32, float16 or bfloat16")
    assets = None if like is None else checkpoint_folder(like)
    source = assets if isinstance(passthrough, bool) else checkpoint_folder(passthrough)
    config = dict(hf_config) if hf_config is not None else read_hf_config(like or "")
    if adapter is None:
        adapter = get_model_spec(config["model_type"], text_only=text_only).state_dict_adapter_class(config)
    buffers = keys_of(adapter, adapter.buffer_shapes)
    if dtype == "like" and assets is None:
        raise CheckpointError(
            f"{path}: dtype is 'like', but like is not set; set like to a checkpoint, or dtype to None"
        )
    stored = stored_dtypes(assets, adapter) if dtype == "like" and assets is not None else {}
    uniform = dtype if isinstance(dtype, torch.dtype) else None
    target = Path(os.path.realpath(path))
    kill_point("export.begin")
    with replaced_export(target, _is_exported, "an export") as folder:
        kill_point("export.staged")
        shards = _ShardWriter(folder, max_shard_bytes)
        with _passthrough_source(target, adapter if passthrough else None, source) as read_passthrough:
            written = _write_weights(
                weights, shards, lambda name: None if name in buffers else stored.get(name, uniform)
            )
            shapes = {name: shape for name, (shape, _) in written.items()}
            is_critic = "score.weight" in written
            of_model = type(adapter)(config, is_critic=True) if is_critic else adapter
            _check_names_and_shapes(target, of_model, shapes)
            # The config has the widest parameter dtype, which represents all others exactly. Router biases and
            # decays may be wider, and with dtype="like" so may single tensors.
            wider = buffers | keys_of(adapter, adapter.full_precision_names)
            dtypes = [written_dtype for name, (_, written_dtype) in written.items() if name not in wider]
            model_dtype = functools.reduce(torch.promote_types, dtypes)
            if dtype == "like" and config_dtype(config) in dtypes:
                model_dtype = config_dtype(config)
            for name, tensor in read_passthrough(model_dtype).items():
                shards.add(name, tensor)
            shards.finish()
        _write_config(folder, config, model_dtype, is_critic=is_critic)
        kill_point("export.config_written")
        copy_assets(folder, assets, tokenizer)
        kill_point("export.assets_copied")
    kill_point("export.end")


def save_hf_distributed(
    path: str | os.PathLike[str],
    weights: Iterator[tuple[str, Tensor]],
    *,
    like: str | os.PathLike[str],
    tokenizer: Any = None,
    dtype: ExportDtype = None,
    passthrough: bool | str | os.PathLike[str] = True,
    text_only: bool = False,
    adapter: BaseStateDictAdapter | None = None,
) -> None:
    """Call `save_hf` on rank 0 with `weights`, an iterator that gathers tensors from all ranks. A collective.

    An error on rank 0 is raised on every rank.
    """
    ranks = ControlPlane.with_long_timeout("exports")

    def export() -> None:
        try:
            if ranks.rank == 0:
                options: dict[str, Any] = {"tokenizer": tokenizer, "dtype": dtype, "text_only": text_only}
                save_hf(path, weights, like=like, passthrough=passthrough, adapter=adapter, **options)
        finally:
            for _ in weights:  # gathering is a collective: every rank must finish it, even after an error
                pass

    ranks.run_on_all(export)


def require_zero_expert_biases(model: nn.Module, adapter: BaseStateDictAdapter, pp: Group | None = None) -> None:
    """Raise CheckpointError on all ranks of the pipeline `pp` if an export would lose a balancing bias.

    A Hugging Face checkpoint has no field for the bias unless the adapter's map names it. Without a nonzero bias the
    router would choose other experts.
    """
    stored = adapter.buffer_shapes
    moved = [name for name, bias in expert_biases(model).items() if name not in stored and bool(bias.any())]
    count = torch.tensor(len(moved), device=next(model.parameters()).device)
    if pp is not None:
        count = all_reduce(count, pp)
    require_zero_biases(moved, int(count))


def require_zero_biases(moved: Sequence[str], count: int | None = None) -> None:
    """Raise CheckpointError if balancing biases are not 0.

    Args:
        moved: names of the nonzero biases on this rank.
        count: number of nonzero biases on all ranks; by default the length of `moved`.
    """
    count = len(moved) if count is None else count
    if count:
        raise CheckpointError(
            f"{count} balancing biases are not 0 ({moved[0] if moved else 'in other stages'}, …), and a Hugging "
            "Face checkpoint cannot hold them; save this model in the native format (archon.checkpoint.native), "
            "or train it with router_bias_update_rate = 0"
        )


def keys_of(adapter: BaseStateDictAdapter, names: Collection[str]) -> set[str]:
    """Return the Hugging Face keys of native names, such as the buffers, which keep their dtype in exports."""
    return {key for key in adapter.hf_shapes() if names and adapter.hf_to_native(key)[0].name in names}


class _ShardWriter:
    """Writer of shards of at most `max_bytes`, or of one larger tensor."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._sizes: list[dict[str, int]] = []
        self._shard: dict[str, Tensor | LazyTensor] = {}
        self._shard_bytes = 0

    def add(self, name: str, tensor: Tensor | LazyTensor) -> None:
        """Add a tensor to the current shard; write the shard first if it is full."""
        size = tensor.numel() * tensor.dtype.itemsize
        if self._shard and self._shard_bytes + size > self.max_bytes:
            self._flush()
        self._shard[name] = tensor
        self._shard_bytes += size

    def finish(self) -> None:
        """Write the last shard and the index."""
        self._flush()
        _rename_shards(self.folder, self._sizes)
        kill_point("export.shards_named")

    def _flush(self) -> None:
        path = self.folder / _shard_name(len(self._sizes), 0)
        write_safetensors(path, self._shard, "export.tensor", with_digest=False)
        self._sizes.append({name: tensor.numel() * tensor.dtype.itemsize for name, tensor in self._shard.items()})
        self._shard.clear()
        self._shard_bytes = 0
        kill_point("export.shard_written")


def _write_weights(
    weights: Iterable[tuple[str, Tensor]], shards: _ShardWriter, dtype_of: Callable[[str], torch.dtype | None]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Write each weight in the dtype `dtype_of(name)` (None: unchanged); return (shape, dtype) by name."""
    written: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in weights:
        if name in written:
            raise CheckpointError(f"weight {name!r} is repeated; expected each weight of an export once")
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"weight {name!r} is {tensor.dtype}; expected float64, float32, float16 or bfloat16: convert it first"
            )
        tensor = tensor.detach().to(dtype_of(name) or tensor.dtype)
        if not _is_finite(tensor):
            raise CheckpointError(
                f"weight {name!r} holds NaN or infinite values as {tensor.dtype}; expected finite ones: export an "
                "earlier checkpoint, or in a wider dtype"
            )
        written[name] = (tuple(tensor.shape), tensor.dtype)
        shards.add(name, tensor.cpu())
    return written


def stored_dtypes(folder: Path, adapter: BaseStateDictAdapter) -> dict[str, torch.dtype]:
    """Return the dtypes in a checkpoint of all Hugging Face tensors of `adapter` and of a value head.

    A tensor that is missing or quantized gets the dtype of the config. The result is empty if the folder has no
    weights and its config has no dtype.
    """
    hf_config = read_hf_config(folder)
    default = config_dtype(hf_config)
    names = [*adapter.hf_shapes(), "score.weight"]
    if not any((folder / name).exists() for name in (INDEX_FILE, WEIGHTS_FILE)):  # the weights were initialized
        return dict.fromkeys(names, default) if hf_config.get("dtype") or hf_config.get("torch_dtype") else {}
    with HFCheckpoint(folder) as checkpoint:
        reader = adapter.for_keys(checkpoint.entries)
        tensors = checkpoint.tensors(reader)
    stored = {key: default if tensor.decoder is not None else tensor.entry.dtype for key, tensor in tensors.items()}
    if reader is not adapter:  # the checkpoint has other names for the same parameters, such as stacked experts
        known = [key for key in reader.hf_shapes() if key in stored]
        native = {part.name: stored[key] for key in known for part in reader.hf_to_native(key)}
        stored |= {key: native.get(adapter.hf_to_native(key)[0].name, default) for key in adapter.hf_shapes()}
    return {name: stored.get(name, default) for name in names}


def _is_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite. A finite sum proves it in a fraction of the time."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


@contextmanager
def _passthrough_source(
    target: Path, adapter: BaseStateDictAdapter | None, source: Path | None
) -> Iterator[Callable[[torch.dtype], Mapping[str, LazyTensor]]]:
    """Open `source` and yield a function from dtype to lazy passthrough tensors (`HFCheckpoint.passthrough`).

    Raises:
        CheckpointError: passthrough keys exist, and `source` is no checkpoint.
    """
    if adapter is None or not adapter.passthrough:
        yield lambda dtype: {}
        return
    why = f"export {target}: keys such as {adapter.passthrough[0]!r} are copied from the loaded checkpoint"
    if source is None:
        raise CheckpointError(f"{why}; name that checkpoint by like, or leave them out by passthrough=False")
    if not any((source / name).exists() for name in (INDEX_FILE, WEIGHTS_FILE)):
        raise CheckpointError(
            f"{why}, but {source} holds no weights; name the checkpoint by like, or leave them out by passthrough=False"
        )
    with HFCheckpoint(source) as checkpoint:
        stored_as: BaseStateDictAdapter = type(adapter)(read_hf_config(source), str(source))
        if adapter.args.n_mtp_layers:
            stored_as = stored_as.with_mtp(checkpoint.entries.keys())
        yield partial(checkpoint.passthrough, stored_as)


def _rename_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    """Rename the shards to their final names, which contain the number of shards, and write the index."""
    if len(shards) == 1:
        (folder / _shard_name(0, 0)).rename(folder / WEIGHTS_FILE)
        return
    weight_map = {}
    for number, shard in enumerate(shards):
        name = _shard_name(number, len(shards))
        (folder / _shard_name(number, 0)).rename(folder / name)
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(size for shard in shards for size in shard.values())
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _check_names_and_shapes(target: Path, adapter: BaseStateDictAdapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the written names and shapes match the adapter's model."""
    expected = adapter.hf_shapes()
    for name in [*expected, *shapes]:
        if expected.get(name) != shapes.get(name):
            raise CheckpointError(
                f"export {target}: the shape of key {name!r} is {shapes.get(name, 'missing')} among the weights and "
                f"{expected.get(name, 'missing')} in the config's model; does the config belong to another model?"
            )


def _write_config(folder: Path, config: dict[str, Any], dtype: torch.dtype, *, is_critic: bool) -> None:
    """Write `config.json`, with the dtype and the architecture of the weights, which are not quantized."""
    config = without_quantization(config)
    fields, name = ("dtype", "torch_dtype"), str(dtype).removeprefix("torch.")
    config |= dict.fromkeys([field for field in fields if field in config] or ["torch_dtype"], name)
    if "text_config" in config:
        text = config["text_config"]
        config["text_config"] = text | {field: name for field in fields if field in text}
    if is_critic:
        # The value-head class of transformers reads its number of outputs from the labels.
        causal = (config.get("architectures") or [""])[0].removesuffix("ForCausalLM")
        if causal and not causal.endswith("ForSequenceClassification"):
            config["architectures"] = [f"{causal}ForSequenceClassification"]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_json(folder / CONFIG_FILE, config)


def copy_assets(folder: Path, assets: Path | None, tokenizer: Any = None) -> None:
    """Copy the files of a model besides its weights.

    Args:
        folder: the export.
        assets: folder of the generation config, the image processor and, by default, the tokenizer.
        tokenizer: a tokenizer, or its folder, to save instead of the one of `assets`.
    """
    write_tokenizer(folder, tokenizer, assets)
    for name in PROCESSOR_FILES:
        if assets is not None and (assets / name).is_file():
            shutil.copyfile(assets / name, folder / name)


def _is_exported(name: str) -> bool:
    """Return whether an export has a file of this name."""
    return name in {CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, MODEL_CARD, *ASSETS} or fnmatch.fnmatch(
        name, "model-*-of-*.safetensors"
    )
