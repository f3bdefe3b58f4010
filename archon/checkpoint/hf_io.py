"""Import and export of Hugging Face checkpoints: models, configs and tokenizers by path.

model = archon.load_model("Qwen3-0.6B")
archon.save_model(model, "mine", like="Qwen3-0.6B")
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from archon.checkpoint.hf_export import MAX_SHARD_BYTES, ExportDtype, require_zero_expert_biases, save_hf
from archon.checkpoint.hf_reader import (
    WEIGHT_DTYPES,
    HFCheckpoint,
    config_dtype,
    copy_hf_weights,
    load_hf_weights,
    loadable_tensors,
    read_hf_config,
    require_shapes,
)
from archon.checkpoint.peft.reader import load_lora, read_saved_modules, read_sizes
from archon.checkpoint.safetensors_file import fail
from archon.checkpoint.tokenizer import load_tokenizer
from archon.models import get_model_spec
from archon.models.args.base import BaseModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import as_dict
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.lora.model import add_lora, is_lora
from archon.models.lora.saved_modules import train_saved_modules
from archon.models.spec import ModelSpec, is_text_decoder
from archon.parallel.gather import full_tensors
from archon.parallel.torch_private import ConversionHook
from archon.schema.errors import CheckpointError, ConfigError, FamilyError

__all__ = [
    "CheckpointSpec",
    "checkpoint_digest",
    "config_dtype",
    "load_model",
    "load_spec",
    "load_tokenizer",
    "materialize",
    "save_model",
]


@dataclass(frozen=True)
class CheckpointSpec:
    """Model family and parsed config of a checkpoint.

    Attributes:
        hf_config: the parsed `config.json`.
        spec: the model family.
        adapter: maps the checkpoint's tensors to parameters; holds the model arguments (`args`) and the config's
            `quantization`.
    """

    hf_config: dict[str, Any]
    spec: ModelSpec
    adapter: BaseStateDictAdapter


def load_spec(
    path: str | os.PathLike[str] | nn.Module,
    *,
    is_critic: bool = False,
    init_score: bool = False,
    text_only: bool = False,
) -> CheckpointSpec:
    """Read and parse the config of a checkpoint folder or of a transformers model; see `load_model`."""
    hf_config = _model_config(path) if isinstance(path, nn.Module) else read_hf_config(path)
    spec = get_model_spec(hf_config["model_type"], text_only=text_only)
    assets = None if isinstance(path, nn.Module) else str(path)
    adapter = spec.state_dict_adapter_class(hf_config, assets, is_critic=is_critic, init_score=init_score)
    return CheckpointSpec(hf_config, spec, adapter)


def load_model(
    path: str | os.PathLike[str] | nn.Module,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    is_critic: bool = False,
    init_score: bool = False,
    attn_type: str = "auto",
    lora: str | os.PathLike[str] | None = None,
    text_only: bool = False,
) -> BaseArchonModel:
    """Load a checkpoint as a plain unsharded module on `device`.

    Args:
        path: a checkpoint folder, a hub id (`Qwen/Qwen3-0.6B`, or with a revision `Qwen/Qwen3-0.6B@main`), or a
            transformers model in memory; its weights are copied.
        device: the device of the weights.
        dtype: parameter dtype; by default the config's `dtype` or `torch_dtype`, else float32. The default for a model
            in memory is the dtype of its weights.
        is_critic: build a value head `score` in place of the language-model head.
        init_score: build a critic from an actor's checkpoint. `score` is drawn from normal(0, initializer_range) with
            the global random generator, and `lm_head` is not loaded.
        attn_type: the attention backend, `auto` or a registered name.
        lora: folder of a LoRA in PEFT's format, added to linear layers. The base weights are then frozen except for
            the folder's saved modules, and the LoRA has their dtype.
        text_only: load only the text decoder of a vision-language model; an export passes the vision encoder through.

    Raises:
        CheckpointError: the weights do not match the config.
        ConfigError: a config field or an argument is not supported.
        UnknownModelError: no family has the config's `model_type`.
    """
    if init_score and not is_critic:
        raise ConfigError("init_score is True and is_critic False; init_score builds a critic: set is_critic=True")
    # 1. Parse the config once, and check the arguments before memory is allocated.
    loaded = load_spec(path, is_critic=is_critic, init_score=init_score, text_only=text_only)
    if dtype is None:
        dtype = next(path.parameters()).dtype if isinstance(path, nn.Module) else config_dtype(loaded.hf_config)
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected torch.float64, float32, float16 or bfloat16")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(f"device {str(device)!r} cannot be used here: {reason}") from None
    adapter = loaded.adapter
    sizes = {} if lora is None else read_sizes(lora, adapter)
    saved_modules = () if lora is None else read_saved_modules(lora, adapter)
    if not isinstance(path, nn.Module):
        require_shapes(path, adapter)
    # 2. Build the model on the meta device, then allocate its memory.
    with torch.device("meta"):
        model = loaded.spec.model_class(replace(adapter.args, attn_type=attn_type)).to(dtype)
        if sizes:
            add_lora(model, sizes, dtype)
            train_saved_modules(model, saved_modules, dtype)
    materialize(model, device)
    # 3. Load the weights.
    if isinstance(path, nn.Module):
        copy_hf_weights(model, adapter, path.state_dict())
    else:
        load_hf_weights(model, adapter, path)
    if init_score:
        assert model.score is not None
        with torch.device("meta"):
            fills = dict(loaded.spec.model_class(adapter.args).initial_weights())
        fills["score.weight"](model.score.weight.detach())
    if lora is not None:
        load_lora(lora, model, adapter, sizes)
    return model


def differing_argument(args: BaseModelArgs, other: BaseModelArgs) -> tuple[str, Any, Any] | None:
    """Return the name and both values of the first argument in which two models differ; None for the same model.

    The attention backend does not matter, nor do balancing biases, which are 0 in a model that is saved or loaded, nor
    multi-token-prediction layers, which a model may leave out.
    """
    first, second = (
        asdict(replace(each, attn_type="auto", balance_by_bias=False, n_mtp_layers=0)) for each in (args, other)
    )
    for name in [*first, *second]:
        if first.get(name) != second.get(name):
            return name, first.get(name), second.get(name)
    return None


def require_same_model(path: str | os.PathLike[str], args: BaseModelArgs) -> None:
    """Raise CheckpointError unless a checkpoint's config describes the model of `args`; reads no weights."""
    loaded = load_spec(path)
    if loaded.spec.model_args_class is not type(args):
        fail(path, f"it is a checkpoint of the family {loaded.spec.name}, expected the served model's")
    if (difference := differing_argument(loaded.adapter.args, args)) is not None:
        name, found, expected = difference
        fail(path, f"its config has {name}={found!r:.200}, expected the served model's {expected!r:.200}")


def _model_config(model: nn.Module) -> dict[str, Any]:
    """Return the config of a transformers model; raise ConfigError for other modules."""
    config = as_dict(getattr(model, "config", None))
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{type(model).__name__} has no config with a model_type; expected a transformers model")
    return config


DIGEST_BYTES = 256
"""Bytes of each tensor that `checkpoint_digest` reads."""


def checkpoint_digest(path: str | os.PathLike[str]) -> str:
    """Return a hash (16 hex digits) of a checkpoint's config, file headers and first bytes of each tensor.

    It distinguishes checkpoints by model, weights and file layout without reading whole files.
    """
    with HFCheckpoint(path) as checkpoint:
        entries = sorted((key, str(e.dtype), e.shape, e.start, e.end) for key, e in checkpoint.entries.items())
        config = json.dumps(read_hf_config(path), sort_keys=True)
        digest = hashlib.sha256(f"{config} {entries}".encode())
        for key, *_, start, end in entries:
            head = bytearray(min(end - start, DIGEST_BYTES))
            checkpoint.files[key].read_into(memoryview(head), start, f"key {key!r}")
            digest.update(head)
    return digest.hexdigest()[:16]


@torch.no_grad()
def materialize(
    model: BaseArchonModel, device: str | torch.device, buffer_device: str | torch.device | None = None
) -> None:
    """Allocate a model built on the meta device, tie its weights and compute its buffers.

    Args:
        model: the model or a pipeline stage.
        device: the device of the weights.
        buffer_device: the device of the buffers; None for `device`.

    Raises:
        ConfigError: the model does not fit `device`.
        FamilyError: the family's `init_buffers` leaves a buffer out, or a layer has dropout.
    """
    try:
        model.to_empty(device=device)
    except RuntimeError as error:  # CUDA's OutOfMemoryError is a RuntimeError too
        if "memory" not in str(error):
            raise
        size = sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())
        raise ConfigError(
            f"the model's {size / 2**30:,.1f} GiB of weights do not fit the memory of {device}; choose a smaller model "
            "or a layout that shards it over more ranks"
        ) from None
    model.tie_weights()
    # Buffers hold arbitrary memory now. Fill them with NaN, which remains where `init_buffers` leaves a buffer out.
    family = model.model_class.__name__
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise FamilyError(
                f"{family} has dropout {module.p:g} in {prefix}; remove it: archon trains without dropout"
            )
        for buffer in () if isinstance(module, ConversionHook) else module.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
    model.init_buffers(device if buffer_device is None else buffer_device)
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in stored and buffer.isnan().any():
            raise FamilyError(
                f"{family}.init_buffers leaves {name} uninitialized; compute it there, since models are built on the "
                "meta device"
            )


def save_model(
    model: BaseArchonModel,
    path: str | os.PathLike[str],
    like: str | os.PathLike[str],
    *,
    dtype: ExportDtype = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    passthrough: bool | str | os.PathLike[str] = True,
) -> None:
    """Export a model with the config and the tokenizer of the checkpoint directory `like`; see `save_hf`.

    Raises:
        CheckpointError: `like` has the config of another model, a router bias is not 0, or the model has a LoRA.
    """
    if any(is_lora(name) for name, _ in model.named_parameters()):
        raise CheckpointError(
            f"{os.fspath(path)}: the model has a LoRA, which an export of its weights would lose; merge it with "
            "archon export --merge, or load the model without it"
        )
    text_only = is_text_decoder(model.args, read_hf_config(like)["model_type"])
    loaded = load_spec(like, is_critic=model.args.is_critic, text_only=text_only)
    if (difference := differing_argument(loaded.adapter.args, model.args)) is not None:
        name, found, saved = difference
        raise CheckpointError(
            f"{like}: its config has {name}={found!r}, the model to save {saved!r}; `like` must be a checkpoint of the "
            "same model"
        )
    adapter = loaded.adapter
    if model.args.n_mtp_layers:
        with HFCheckpoint(like) as checkpoint:
            adapter = adapter.with_mtp(checkpoint.entries.keys())
    require_zero_expert_biases(model, adapter)
    weights = adapter.export(full_tensors(loadable_tensors(model, adapter).items()))
    limits: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_shard_bytes}
    limits |= {"passthrough": passthrough, "text_only": text_only, "adapter": adapter}
    save_hf(path, weights, loaded.hf_config, like=like, **limits)
