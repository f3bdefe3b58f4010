"""How the tensors of a DCP folder are named: as in this project's models, in Hugging Face's, or in torchtitan's.

A folder has exactly the model's tensors, behind a prefix that they share (`model.`), and next to them at most a
training's other state (optimizer, data loader).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor

import archon
from archon.checkpoint.atomic import write_json
from archon.checkpoint.hf_export import require_zero_biases
from archon.checkpoint.hf_reader import WEIGHT_DTYPES
from archon.checkpoint.safetensors_file import LazyTensor, Region, fail, full_region
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import ConfigError

Names = Literal["native", "hf", "torchtitan"]
NAMES: tuple[Names, ...] = get_args(Names)
MARKER_FILE = "dcp.json"
# First parts of the names of a training's other state, in torchtitan's and in PyTorch's examples.
TRAINER_STATE = frozenset(
    {"optimizer", "optim", "optimizers", "lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state"}
)
_BIAS = re.compile(r"layers\.\d+\.moe\.(router\.expert_bias|expert_bias|expert_bias_E)")

# Parameters mapped by torchtitan 0.3's state_dict_adapter of each family, with torchtitan's names.
_DENSE = (
    r"(tok_embeddings|norm|output)\.weight",
    r"layers\.\d+\.(attention\.w[qkvo]|feed_forward\.w[123]|attention_norm|ffn_norm)\.weight",
)
_QWEN3 = (*_DENSE, r"layers\.\d+\.attention\.[qk]_norm\.weight")
_MOE = (*_QWEN3, r"layers\.\d+\.moe\.(router\.gate\.weight|experts\.w[123])")
TITAN_FAMILIES = {"llama": _DENSE, "qwen3": _QWEN3, "qwen3_moe": _MOE}
_TITAN_NAMES = (
    (r"^output\.", "lm_head."),
    (r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1."),
    (r"\.moe\.experts\.(w[13])$", r".moe.routed_experts.inner_experts.\1_EFD"),
    (r"\.moe\.experts\.(w2)$", r".moe.routed_experts.inner_experts.\1_EDF"),
)
# torchtitan's Llama rotates neighboring elements of a head, Hugging Face's and this project's its halves.
_INTERLEAVED_FAMILIES = frozenset({"llama"})
_INTERLEAVED = re.compile(r"layers\.\d+\.attention\.w([qk])\.weight")


@dataclass(frozen=True)
class NamingScheme:
    """One way to name a model's tensors.

    Attributes:
        stored: the stored names by Hugging Face name (`hf`) or by parameter name (the others).
        copy: the stored name of a tied model's head, a copy of the embedding, which need not be there.
        embedding: the stored name of the embedding.
        interleaved: the rows of wq and wk alternate between the halves of each head.
    """

    names: Names
    stored: Mapping[str, str]
    copy: str | None
    embedding: str
    interleaved: bool = False


def naming_schemes(adapter: BaseStateDictAdapter, model_type: str) -> list[NamingScheme]:
    """Return the naming schemes of a model; torchtitan schemes only for models that torchtitan has."""
    parameters, keys, is_tied = adapter.stored_shapes, adapter.hf_shapes(), adapter.is_tied
    native = NamingScheme(
        "native", {name: name for name in parameters}, "output.weight" if is_tied else None, "tok_embeddings.weight"
    )
    hf_head, hf_embedding = adapter.to_hf_map.get("output.weight"), adapter.to_hf_map["tok_embeddings.weight"]
    hf = NamingScheme("hf", {key: key for key in keys}, hf_head if is_tied else None, hf_embedding)
    known = TITAN_FAMILIES.get(model_type, ())
    if not all(any(re.fullmatch(pattern, name) for pattern in known) for name in parameters):
        return [native, hf]
    interleaved = model_type in _INTERLEAVED_FAMILIES
    renamed = {name: _titan_name(name) for name in parameters}
    titan = NamingScheme("torchtitan", renamed, "lm_head.weight" if is_tied else None, native.embedding, interleaved)
    # Before 0.3 torchtitan's names were this project's; the rows of its Llama were interleaved all the same.
    earlier = NamingScheme("torchtitan", native.stored, native.copy, native.embedding, interleaved)
    return [native, hf, titan, *([earlier] if interleaved else [])]


def _titan_name(name: str) -> str:
    for pattern, replacement in _TITAN_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def target_scheme(names: Names, adapter: BaseStateDictAdapter, model_type: str) -> NamingScheme:
    """Return the scheme with the name `names`.

    Raises:
        ConfigError: torchtitan has no such model.
    """
    for scheme in naming_schemes(adapter, model_type):
        if scheme.names == names:
            return scheme
    raise ConfigError(
        f"torchtitan's names (--names torchtitan) are known for {', '.join(TITAN_FAMILIES)} without biases, not for "
        f"this {model_type}; expected --names native or hf"
    )


def match_names(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    adapter: BaseStateDictAdapter,
    model_type: str,
    names: Names | None = None,
) -> tuple[NamingScheme, dict[str, LazyTensor]]:
    """Return the naming scheme of a directory, and its tensors by Hugging Face name (`hf`) or parameter name.

    Args:
        folder: DCP directory, for errors.
        tensors: its tensors by name.
        adapter: state-dict adapter of the model.
        model_type: Hugging Face model type.
        names: naming scheme; by default read from `dcp.json` or detected.

    Raises:
        CheckpointError: the tensors are not exactly the model's, with the right shapes.
        ConfigError: the names fit several schemes that differ in the order of rows.
    """
    requested = names or _read_marker(folder)
    all_schemes = naming_schemes(adapter, model_type)
    if requested is not None:
        target_scheme(requested, adapter, model_type)
    candidates = [scheme for scheme in all_schemes if requested in (None, scheme.names)]
    matches = [(scheme, prefix) for scheme in candidates for prefix in _prefixes(scheme, tensors)]
    if not matches:
        _refuse_names(folder, tensors, candidates)
    scheme, prefix = matches[0]
    for other, other_prefix in matches[1:]:
        if other_prefix != prefix:
            fail(folder, f"it holds two models, at {prefix!r} and {other_prefix!r}; save one of them alone")
        if other.interleaved != scheme.interleaved:
            raise ConfigError(
                f"{folder}: its names match {scheme.names} and {other.names} of before 0.3, which order the rows of wq "
                f"and wk differently; say which by names (--names): {scheme.names} or {other.names}"
            )
    shapes = adapter.hf_shapes() if scheme.names == "hf" else adapter.stored_shapes
    matched = {}
    for name, stored in scheme.stored.items():
        tensor = tensors[prefix + stored]
        if tensor.shape != shapes[name]:
            fail(folder, f"tensor {prefix + stored!r} has shape {list(tensor.shape)}, expected {list(shapes[name])}")
        if tensor.dtype not in WEIGHT_DTYPES:
            fail(folder, f"tensor {prefix + stored!r} is {tensor.dtype}; expected float64, 32, 16 or bfloat16")
        matched[name] = tensor
    _check_extra_tensors(folder, tensors, adapter, scheme, prefix)
    return scheme, _reorder_rope_rows(matched, adapter, to_halves=True) if scheme.interleaved else matched


def named_tensors(
    scheme: NamingScheme, tensors: Mapping[str, LazyTensor], adapter: BaseStateDictAdapter
) -> dict[str, LazyTensor]:
    """Return tensors under the names to store them, with the head of a tied model as in its `state_dict()`.

    Args:
        scheme: naming scheme.
        tensors: tensors by Hugging Face name (`hf`) or parameter name.
        adapter: state-dict adapter of the model.
    """
    if scheme.interleaved:
        tensors = _reorder_rope_rows(tensors, adapter, to_halves=False)
    named = {stored: tensors[name] for name, stored in scheme.stored.items()}
    return named if scheme.copy is None else named | {scheme.copy: named[scheme.embedding]}


def write_marker(folder: Path, names: Names) -> None:
    """Write to a DCP folder how its tensors are named."""
    write_json(folder / MARKER_FILE, {"format": 1, "archon": archon.__version__, "names": names})


def _read_marker(folder: Path) -> Names | None:
    file = folder / MARKER_FILE
    if not file.is_file():
        return None
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["names"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        fail(file, f"it has no readable naming scheme ({type(error).__name__}); remove it to have it detected")
    if names not in NAMES:
        fail(file, f"unknown naming scheme; expected one of {', '.join(NAMES)}")
    return names


def _prefixes(scheme: NamingScheme, tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Return the prefixes that stand before all names of a scheme."""
    prefixes = _embedding_prefixes(scheme, tensors)
    return [prefix for prefix in prefixes if all(prefix + name in tensors for name in scheme.stored.values())]


def _embedding_prefixes(scheme: NamingScheme, tensors: Mapping[str, LazyTensor]) -> list[str]:
    end = scheme.embedding
    return [key.removesuffix(end) for key in tensors if key == end or key.endswith(f".{end}")]


def _refuse_names(folder: Path, tensors: Mapping[str, LazyTensor], candidates: list[NamingScheme]) -> NoReturn:
    """Raise CheckpointError with the missing names of the nearest scheme."""
    missing = {}
    for scheme in candidates:
        for prefix in _embedding_prefixes(scheme, tensors) or [""]:
            missing[scheme.names, prefix] = [n for n in scheme.stored.values() if prefix + n not in tensors]
    (names, prefix), absent = min(missing.items(), key=lambda item: len(item[1]))
    fail(
        folder,
        f"its {len(tensors)} tensors are not this model's: of {names} names, the nearest, {len(absent)} are missing, "
        f"{prefix + absent[0]!r} first; is it the config of another model?",
    )


def _check_extra_tensors(
    folder: Path, tensors: Mapping[str, LazyTensor], adapter: BaseStateDictAdapter, scheme: NamingScheme, prefix: str
) -> None:
    """Raise CheckpointError for a tensor that is neither the model's, nor passthrough, nor other training state."""
    used = {prefix + name for name in scheme.stored.values()}
    biases = []
    for key in tensors:
        if key in used or not key.startswith(prefix) or (not prefix and key.split(".")[0] in TRAINER_STATE):
            continue
        name = key.removeprefix(prefix)
        if name == scheme.copy:
            if not _bitwise_equal(tensors[key], tensors[prefix + scheme.embedding]):
                fail(folder, f"tensor {key!r} differs from the embedding, but the config ties them")
        elif _BIAS.fullmatch(name):
            biases.append(key)
        elif scheme.names == "hf" and adapter.is_passthrough(name):
            continue  # an export copies it from the checkpoint that `like` names
        else:
            fail(folder, f"tensor {key!r} is not part of this model; is it the config of another one?")
    require_zero_biases([key for key in biases if bool(tensors[key].read().any())])


def _bitwise_equal(first: LazyTensor, second: LazyTensor) -> bool:
    """Return whether two tensors are bitwise equal, compared row by row."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    step = 1024
    for row in range(0, first.shape[0], step):
        region = (slice(row, min(row + step, first.shape[0])), *full_region(first.shape[1:]))
        if not torch.equal(first.read(region).view(torch.uint8), second.read(region).view(torch.uint8)):
            return False
    return True


def _reorder_rope_rows(
    tensors: Mapping[str, LazyTensor], adapter: BaseStateDictAdapter, *, to_halves: bool
) -> dict[str, LazyTensor]:
    """Return tensors by parameter name with the rows of wq and wk reordered within each head."""
    heads = {"q": adapter.args.n_heads, "k": adapter.args.n_kv_heads}
    reordered = dict(tensors)
    for name, tensor in tensors.items():
        match = _INTERLEAVED.fullmatch(name)
        if match is not None:
            load = partial(_read_reordered, tensor, heads[match[1]], to_halves)
            reordered[name] = LazyTensor(tensor.dtype, tensor.shape, load)
    return reordered


def _read_reordered(tensor: LazyTensor, heads: int, to_halves: bool, region: Region) -> Tensor:
    """Return a region of a projection with its rows reordered within each head.

    The rows of a head are pairs (i, half); interleaved they are sorted by i, otherwise by half.
    """
    rows, columns = region
    whole = tensor.read((slice(0, tensor.shape[0]), columns))
    pairs = (-1, 2) if to_halves else (2, -1)
    parts = whole.unflatten(0, (heads, tensor.shape[0] // heads)).unflatten(1, pairs)
    return parts.transpose(1, 2).reshape(whole.shape)[rows]
