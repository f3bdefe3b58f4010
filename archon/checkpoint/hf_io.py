"""Hugging Face checkpoints in and out: models, configs and tokenizers by path.

model = archon.load_model("Qwen3-0.6B")
archon.save_model(model, "mine", like="Qwen3-0.6B")
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from archon.checkpoint.hf_export import (
    MAX_SHARD_BYTES,
    VOCABULARY_FILES,
    refuse_expert_biases,
    save_hf,
    save_hf_together,
)
from archon.checkpoint.hf_reader import WEIGHT_DTYPES, HFCheckpoint, load_hf_weights, read_hf_config
from archon.models import get_model_spec
from archon.models.base import BaseArchonModel
from archon.parallel.gather import whole_tensors
from archon.schema.errors import CheckpointError, ConfigError, TokenizerError

__all__ = [
    "HFCheckpoint",
    "load_hf_weights",
    "load_model",
    "load_tokenizer",
    "read_hf_config",
    "refuse_expert_biases",
    "save_hf",
    "save_hf_together",
    "save_model",
]


def load_model(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    is_critic: bool = False,
    init_score: bool = False,
    attn_type: str = "auto",
) -> BaseArchonModel:
    """The model of a checkpoint folder, with its weights, as one plain module on `device`.

    Args:
        dtype: of the parameters; by default what the config names (`dtype` or `torch_dtype`), else float32.
        is_critic: with a value head `score` in place of the language-model head.
        init_score: allow a critic from an actor's checkpoint: `score` starts at normal(0, initializer_range) from the
            global random generator, `lm_head` is dropped.
        attn_type: the attention backend, `auto` or a registered name.

    Raises CheckpointError, ConfigError or UnknownModelError in one line for a folder that archon cannot load exactly.
    """
    if init_score and not is_critic:
        raise ConfigError("init_score=True makes a critic from an actor; set is_critic=True as well")
    hf_config = read_hf_config(path)
    dtype = dtype or config_dtype(hf_config)
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected torch.float64, float32, float16 or bfloat16")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(f"device {str(device)!r} cannot be used here: {reason}") from None
    spec = get_model_spec(hf_config["model_type"])
    args = spec.model_args_class.from_hf_config(hf_config, is_critic=is_critic, attn_type=attn_type)
    adapter = spec.state_dict_adapter_class(hf_config, str(path), is_critic=is_critic, init_score=init_score)
    with torch.device("meta"):
        model = spec.model_class(args).to(dtype)
    materialise(model, device)
    model.tie_weights()
    model.init_buffers(device)
    load_hf_weights(model, adapter, path)
    if init_score:
        assert model.score is not None
        nn.init.normal_(model.score.weight, std=args.initializer_range)
    return model


def checkpoint_digest(path: str | os.PathLike[str]) -> str:
    """What tells a checkpoint from another without reading its weights: a hash of its config and of the headers of its
    files, as 16 hexadecimal digits."""
    with HFCheckpoint(path) as checkpoint:
        entries = sorted((key, str(e.dtype), e.shape, e.start, e.end) for key, e in checkpoint.entries.items())
    config = json.dumps(read_hf_config(path), sort_keys=True)
    return hashlib.sha256(f"{config} {entries}".encode()).hexdigest()[:16]


def materialise(model: nn.Module, device: str | torch.device) -> None:
    """Give a model built on the meta device its memory; ConfigError, with the size, where there is not enough."""
    try:
        model.to_empty(device=device)
    except RuntimeError as error:  # of a CPU a plain one; CUDA's OutOfMemoryError is one too
        if "memory" not in str(error):
            raise
        size = sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())
        raise ConfigError(
            f"the model's {size / 2**30:,.1f} GiB of weights do not fit the memory of {device}; choose a smaller model"
        ) from None


def save_model(
    model: BaseArchonModel,
    path: str | os.PathLike[str],
    like: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Export a model with the config and the tokenizer of the checkpoint folder `like`; see `save_hf`.

    Raises CheckpointError where that config describes another model, or a balancing bias is not 0.
    """
    refuse_expert_biases(model)
    hf_config = read_hf_config(like)
    spec = get_model_spec(hf_config["model_type"])
    own = asdict(model.args)
    if "balance_by_bias" in own:
        own["balance_by_bias"] = False  # biases of 0 change nothing
    given = asdict(
        spec.model_args_class.from_hf_config(hf_config, model.args.is_critic, attn_type=model.args.attn_type)
    )
    for name in [*own, *given]:
        if own.get(name) != given.get(name):
            raise CheckpointError(
                f"{like}: its config has {name}={given.get(name)!r}, the model to save {own.get(name)!r}; "
                "`like` must be a checkpoint of the same model"
            )
    adapter = spec.state_dict_adapter_class(hf_config, str(like), is_critic=model.args.is_critic)
    weights = (
        pair
        for name, whole in whole_tensors(model.named_parameters())
        for pair in adapter.convert_single_to_hf(name, whole)
    )
    save_hf(path, weights, hf_config, like=like, dtype=dtype, max_shard_bytes=max_shard_bytes)


def config_dtype(hf_config: dict[str, Any]) -> torch.dtype:
    """The dtype a Hugging Face config names, in the new style or the old; float32 where it names none."""
    name = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"config field 'dtype' is {name!r}; expected a floating-point dtype, such as 'bfloat16'")
    return dtype


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder; `apply_chat_template(tokenize=True)` returns a plain list of ids.

    transformers 5 returns a mapping there unless asked otherwise, while workflows written for the public RL frameworks
    expect the list. Raises TokenizerError where the folder holds no tokenizer, or one without an end-of-text token.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise TokenizerError(f"{folder}: no such folder; expected one with a tokenizer")
    # Without a vocabulary transformers makes a tokenizer of the config's family that knows no token.
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise TokenizerError(f"{folder}: it holds no tokenizer (no tokenizer.json); copy the tokenizer's files there")
    # Importing transformers takes seconds, and only text needs it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{folder}: its tokenizer cannot be loaded ({reason})") from error
    if tokenizer.eos_token_id is None:
        raise TokenizerError(
            f"{folder}: its tokenizer has no end-of-text token, which ends an answer; set eos_token in it"
        )
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer
