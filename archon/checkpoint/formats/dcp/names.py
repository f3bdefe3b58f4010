"""Naming schemes of DCP folders: archon's parameter names, Hugging Face keys, or torchtitan's names.

A folder has exactly the model's tensors under a shared prefix (such as `model.`), and optionally other training state
(optimizer, data loader).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn, get_args

from torch import Tensor

import archon
from archon.checkpoint.atomic import write_json
from archon.checkpoint.hf_export import require_zero_biases
from archon.checkpoint.hf_reader import WEIGHT_DTYPES
from archon.checkpoint.safetensors_file import LazyTensor, Region, bitwise_equal, fail
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import ConfigError

Names = Literal["native", "hf", "torchtitan"]
NAMES: tuple[Names, ...] = get_args(Names)
MARKER_FILE = "dcp.json"
# First name components of other training state in torchtitan and in PyTorch's examples.
TRAINER_STATE = frozenset(
    {"optimizer", "optim", "optimizers", "lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state"}
)
_BIAS = re.compile(r"layers\.\d+\.moe\.(router\.expert_bias|expert_bias|expert_bias_E)")

# Parameters that torchtitan 0.3's state_dict_adapter maps, by family, and their torchtitan names.
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
# torchtitan's Llama rotates neighboring elements of a head; Hugging Face and archon rotate its halves.
_INTERLEAVED_FAMILIES = frozenset({"llama"})
_INTERLEAVED = re.compile(r"layers\.\d+\.attention\.w([qk])\.weight")


@dataclass(frozen=True)
class NamingScheme:
    """One way to name a model's tensors.

    Attributes:
        names: kind of names.
        stored: stored names by Hugging Face key (`hf`) or by parameter name (otherwise).
        copy: stored name of a tied model's head, an optional copy of the embedding.
        embedding: stored name of the embedding.
        interleaved: the rows of wq and wk alternate between the halves of each head.
    """

    names: Names
    stored: Mapping[str, str]
    copy: str | None
    embedding: str
    interleaved: bool = False


def naming_schemes(adapter: BaseStateDictAdapter, model_type: str) -> list[NamingScheme]:
    """Return the naming schemes of a model; torchtitan's only if torchtitan has the model."""
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
    # Before 0.3 torchtitan used the native names; the rows of its Llama were interleaved too.
    earlier = NamingScheme("torchtitan", native.stored, native.copy, native.embedding, interleaved)
    return [native, hf, titan, *([earlier] if interleaved else [])]


def _titan_name(name: str) -> str:
    for pattern, replacement in _TITAN_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def target_scheme(names: Names, adapter: BaseStateDictAdapter, model_type: str) -> NamingScheme:
    """Return the scheme for `names`; raise ConfigError if torchtitan lacks the model."""
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
    """Return a folder's naming scheme, and its tensors by Hugging Face key (`hf`) or parameter name.

    `names` selects the scheme; by default `dcp.json` does, or the only scheme that fits.

    Raises:
        CheckpointError: the folder does not have exactly the model's tensors in the right shapes.
        ConfigError: the names fit several schemes with different row orders.
    """
    selected = names or _read_marker(folder)
    all_schemes = naming_schemes(adapter, model_type)
    if selected is not None:
        target_scheme(selected, adapter, model_type)
    candidates = [scheme for scheme in all_schemes if selected in (None, scheme.names)]
    matches = [(scheme, prefix) for scheme in candidates for prefix in _prefixes(scheme, tensors)]
    if not matches:
        _refuse_names(folder, tensors, candidates)
    scheme, prefix = matches[0]
    for other, other_prefix in matches[1:]:
        if other_prefix != prefix:
            fail(folder, f"it holds two models, at {prefix!r} and {other_prefix!r}; save one of them alone")
        if other.interleaved != scheme.interleaved:
            raise ConfigError(
                f"{folder}: its names fit {scheme.names} and {other.names} before 0.3, which order the rows of wq and "
                f"wk differently; set names (--names) to {scheme.names} or {other.names}"
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
    """Rename tensors (by Hugging Face key or parameter name) to stored names; a tied head is added as a copy."""
    if scheme.interleaved:
        tensors = _reorder_rope_rows(tensors, adapter, to_halves=False)
    named = {stored: tensors[name] for name, stored in scheme.stored.items()}
    return named if scheme.copy is None else named | {scheme.copy: named[scheme.embedding]}


def write_marker(folder: Path, names: Names) -> None:
    """Record the naming scheme in a DCP folder."""
    write_json(folder / MARKER_FILE, {"format": 1, "archon": archon.__version__, "names": names})


def _read_marker(folder: Path) -> Names | None:
    file = folder / MARKER_FILE
    if not file.is_file():
        return None
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["names"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        fail(file, f"it has no readable naming scheme ({type(error).__name__}); remove the file to detect the scheme")
    if names not in NAMES:
        fail(file, f"its naming scheme is unknown; expected one of {', '.join(NAMES)}")
    return names


def _prefixes(scheme: NamingScheme, tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Return the prefixes that have all names of a scheme."""
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
        f"its {len(tensors)} tensors do not match this model: {len(absent)} names of the nearest scheme, {names}, are "
        f"missing, {prefix + absent[0]!r} first; does the config belong to another model?",
    )


def _check_extra_tensors(
    folder: Path, tensors: Mapping[str, LazyTensor], adapter: BaseStateDictAdapter, scheme: NamingScheme, prefix: str
) -> None:
    """Raise CheckpointError for tensors under the prefix other than weights, passthrough and trainer state."""
    used = {prefix + name for name in scheme.stored.values()}
    biases = []
    for key in tensors:
        if key in used or not key.startswith(prefix) or (not prefix and key.split(".")[0] in TRAINER_STATE):
            continue
        name = key.removeprefix(prefix)
        if name == scheme.copy:
            if not bitwise_equal(tensors[key], tensors[prefix + scheme.embedding]):
                fail(folder, f"tensor {key!r} differs from the embedding, to which the config ties it")
        elif _BIAS.fullmatch(name):
            biases.append(key)
        elif scheme.names == "hf" and adapter.is_passthrough(name):
            continue  # an export copies it from the checkpoint that `like` names
        else:
            fail(folder, f"tensor {key!r} is not part of this model; does the config belong to another model?")
    require_zero_biases([key for key in biases if bool(tensors[key].read().any())])


def _reorder_rope_rows(
    tensors: Mapping[str, LazyTensor], adapter: BaseStateDictAdapter, *, to_halves: bool
) -> dict[str, LazyTensor]:
    """Reorder the rows of wq and wk within each head."""
    heads = {"q": adapter.args.n_heads, "k": adapter.args.n_kv_heads}
    reordered = dict(tensors)
    for name, tensor in tensors.items():
        match = _INTERLEAVED.fullmatch(name)
        if match is not None:
            load = partial(_read_reordered, tensor, heads[match[1]], to_halves)
            reordered[name] = LazyTensor(tensor.dtype, tensor.shape, load)
    return reordered


def _read_reordered(tensor: LazyTensor, heads: int, to_halves: bool, region: Region) -> Tensor:
    """Read a region of a projection, reordering rows within each head.

    The rows of a head are pairs (i, half): sorted by i if interleaved, otherwise by half.
    """
    rows, columns = region
    projection = tensor.read((slice(0, tensor.shape[0]), columns))
    pairs = (-1, 2) if to_halves else (2, -1)
    parts = projection.unflatten(0, (heads, tensor.shape[0] // heads)).unflatten(1, pairs)
    return parts.transpose(1, 2).reshape(projection.shape)[rows]
