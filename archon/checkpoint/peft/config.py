"""Reader and writer of PEFT's `adapter_config.json`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.checkpoint.hf_reader import read_json
from archon.checkpoint.hub import parse_hub_id
from archon.checkpoint.peft.layout import PeftTensor
from archon.checkpoint.safetensors_file import fail
from archon.models.lora.targets import LoRASize
from archon.schema.name_patterns import NamePattern, NamePatterns, name_suffixes

CONFIG_FILE = "adapter_config.json"
WRITTEN_PEFT_VERSION = "0.21.2"
"""PEFT version of the written format."""
_MAX_BYTES = 2**24
_MAX_SIZE = 2**31  # of a rank and an alpha; torch's sizes of a LoRA stay in 32 bits
MAX_PATH = 1024
"""Maximum characters of a path or hub id: Linux allows 4,096 bytes, and a character has at most 4."""

# Fields that define how a LoRA is applied, read below.
_READ_FIELDS = {
    "peft_type",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "init_lora_weights",
    "lora_dropout",
    "use_dora",
    "modules_to_save",
    "ensure_weight_tying",
}
# Fields without effect on a trained LoRA.
_IGNORED_FIELDS = {
    "task_type",  # its modules_to_save are listed too
    "auto_mapping",
    "inference_mode",
    "layers_pattern",  # the tensors' names are checked instead
    "megatron_config",
    "megatron_core",
    "runtime_config",  # where PEFT computes initial values
    "eva_config",  # settings of an init_lora_weights, which is checked
    "lora_ga_config",
    "qalora_group_size",  # setting of use_qalora, which is refused
}
# Initializations that keep the base weights; others (PiSSA, OLoRA, LoftQ, CorDA) change them.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_OFF: tuple[Any, ...] = (None, False, "none", [], {})


@dataclass(frozen=True)
class PeftConfig:
    """Fields of a PEFT config that define how a LoRA is applied.

    Attributes:
        path: the file, for error messages.
        base: path or hub id of the base checkpoint, if any.
        version: PEFT version; (0, 0) for files before 0.18, which have none.
        rank: default rank.
        alpha: default alpha.
        rslora: whether the scale is alpha / sqrt(rank).
        ranks: ranks by name patterns.
        alphas: alphas by name patterns.
        modules: names or name suffixes of modules, or a regular expression of full names; None for any module.
        parameters: names or name suffixes of parameters.
        excluded: modules without a LoRA, in the format of `modules`.
        layers: layers with a LoRA; None for all.
        dropout: dropout of the LoRA's inputs in training by PEFT.
        all_linear: whether `target_modules` is all-linear: every linear layer but the head, in any layer.
        dora: whether linear layers have DoRA magnitudes.
        saved_modules: `modules_to_save`, name suffixes of modules that are stored whole.
        ties_weights: `ensure_weight_tying`: a tied embedding and head are one trained matrix.
    """

    path: Path
    base: str | None
    version: tuple[int, ...]
    rank: int
    alpha: float
    rslora: bool
    ranks: NamePatterns[float]
    alphas: NamePatterns[float]
    modules: frozenset[str] | NamePattern | None
    parameters: frozenset[str]
    excluded: frozenset[str] | NamePattern
    layers: frozenset[int] | None
    dropout: float
    all_linear: bool = False
    dora: bool = False
    saved_modules: frozenset[str] = frozenset()
    ties_weights: bool = False

    def is_parameter(self, name: str) -> bool:
        """Return whether `target_parameters` names this parameter."""
        return _matches(self.parameters, name)

    def size(self, tensor: PeftTensor) -> LoRASize:
        """Return the LoRA size of a tensor; raise CheckpointError if the config excludes it."""
        key = tensor.name
        if tensor.experts is None and self.is_parameter(f"{key}.weight"):
            key = f"{key}.weight"
        elif tensor.experts is None and (problem := self._exclusion_reason(key)):
            fail(self.path, f"the weights file has a LoRA of {key!r}, but {problem}")
        rank, alpha = int(self.ranks.first(key, self.rank)), float(self.alphas.first(key, self.alpha))
        return LoRASize(rank, alpha, self.rslora, dora=self.dora)

    def names(self, module: str) -> bool:
        """Return whether `target_modules` names this module and nothing excludes it, so that it must have a LoRA."""
        return (self.all_linear or self.modules is not None) and self._exclusion_reason(module) is None

    def _exclusion_reason(self, module: str) -> str | None:
        """Return the reason why a module has no LoRA, if any."""
        if self.modules is not None and not _matches(self.modules, module):
            return "target_modules does not name it"
        if _matches(self.excluded, module):
            return "exclude_modules names it"
        layer = re.search(r"\.layers\.(\d+)\.", module)
        exact = isinstance(self.modules, frozenset) and module in self.modules
        if self.layers is None or layer is None or exact or self.all_linear or int(layer[1]) in self.layers:
            return None
        return f"layers_to_transform, {sorted(self.layers)}, does not have its layer"


def _matches(names: frozenset[str] | NamePattern, name: str) -> bool:
    """Match a name as PEFT does: by names or name suffixes, or a regular expression of full names."""
    return names.matches(name) if isinstance(names, NamePattern) else not names.isdisjoint(name_suffixes(name))


def read_config(path: Path) -> PeftConfig:
    """Read a config with PEFT's defaults; raise CheckpointError if it is malformed or not supported."""
    config = read_json(path, _MAX_BYTES)
    if config.get("peft_type") != "LORA":
        fail(path, f"peft_type is {config.get('peft_type')!r}; expected 'LORA'")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        fail(
            path,
            f"init_lora_weights is {config['init_lora_weights']!r}, which changed the base's weights; convert it to a "
            "plain LoRA with PEFT (save_pretrained's path_initial_model_for_weight_conversion)",
        )
    for field, value in config.items():
        is_known = field in _READ_FIELDS | _IGNORED_FIELDS or field.startswith("unsloth_")
        if not is_known and value not in _OFF:
            fail(path, f"{field} is {value!r}, which archon does not support; expected it to be off")
    rslora, dora, ties = (_flag(path, config, x) for x in ("use_rslora", "use_dora", "ensure_weight_tying"))
    targets, base = config.get("target_modules"), _path(path, config, "base_model_name_or_path")
    all_linear = isinstance(targets, str) and targets.lower() == "all-linear"  # as PEFT compares
    return PeftConfig(
        path=path,
        base=_with_revision(base, _path(path, config, "revision")) if base else None,
        version=_version(path, config.get("peft_version")),
        rank=_rank(path, "r", config.get("r", 8)),
        alpha=_alpha(path, "lora_alpha", config.get("lora_alpha", 8)),
        rslora=rslora,
        ranks=_patterns(path, config, "rank_pattern"),
        alphas=_patterns(path, config, "alpha_pattern"),
        modules=None if targets is None or all_linear else _names(path, config, "target_modules"),
        parameters=_list_of_names(path, config, "target_parameters"),
        excluded=_names(path, config, "exclude_modules"),
        layers=_layers(path, config.get("layers_to_transform")),
        dropout=_dropout(path, config.get("lora_dropout") or 0.0),
        all_linear=all_linear,
        dora=dora,
        saved_modules=_list_of_names(path, config, "modules_to_save"),
        ties_weights=ties,
    )


def _path(path: Path, config: Mapping[str, Any], field: str) -> str | None:
    """Return a path, a hub id or a revision, or None; what the file system cannot hold is refused."""
    value = config.get(field)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_PATH or not value.isprintable():
        fail(path, f"{field} is {value!r:.200}; expected null or a text of at most {MAX_PATH} printable characters")
    return value


def _flag(path: Path, config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field)
    if value not in (True, False, None):
        fail(path, f"{field} is {value!r}; expected true or false")
    return bool(value)


def _with_revision(base: str, revision: str | None) -> str:
    """Return a hub id with its revision; a path has none."""
    hub_id = None if Path(base).exists() else parse_hub_id(base)
    return f"{base}@{revision}" if hub_id is not None and revision else base


def _rank(path: Path, field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX_SIZE:
        fail(path, f"{field} is {value!r}; expected a positive whole number below {_MAX_SIZE}")
    return value


def _alpha(path: Path, field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _MAX_SIZE:
        fail(path, f"{field} is {value!r}; expected a positive number below {_MAX_SIZE}")
    return float(value)


def _patterns(path: Path, config: Mapping[str, Any], field: str) -> NamePatterns[float]:
    values = config.get(field) or {}
    if not isinstance(values, dict):
        fail(path, f"{field} is {values!r}; expected positive numbers by module names")
    check = _rank if field == "rank_pattern" else _alpha
    # CheckpointError is a ValueError: the values are checked outside of the block, which would name the file twice.
    checked = {key: check(path, f"{field}[{key!r}]", value) for key, value in values.items()}
    try:
        return NamePatterns(checked)
    except ValueError as error:
        fail(path, f"{field} has {error}")


def _names(path: Path, config: Mapping[str, Any], field: str) -> frozenset[str] | NamePattern:
    if not isinstance(config.get(field), str):
        return _list_of_names(path, config, field)
    try:
        return NamePattern(config[field])
    except ValueError as error:
        fail(path, f"{field} is {config[field]!r}, which is no valid regular expression of names: {error}")


def _list_of_names(path: Path, config: Mapping[str, Any], field: str) -> frozenset[str]:
    names = config.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        fail(path, f"{field} is {names!r}; expected a list of names")
    return frozenset(names)


def _layers(path: Path, value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    if any(not isinstance(number, int) or isinstance(number, bool) for number in numbers):
        fail(path, f"layers_to_transform is {value!r}; expected numbers of layers")
    return frozenset(numbers)


def _dropout(path: Path, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        fail(path, f"lora_dropout is {value!r}; expected a probability below 1")
    return float(value)


def _version(path: Path, value: Any) -> tuple[int, ...]:
    if value is None:
        return (0, 0)
    match = re.match(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", value) if isinstance(value, str) else None
    if match is None:
        fail(path, f"peft_version is {value!r}; expected for example {WRITTEN_PEFT_VERSION!r}")
    return tuple(int(number or 0) for number in match.groups())


def config_fields(
    sizes: Mapping[str, LoRASize],
    modules: list[str],
    parameters: list[str],
    base: str,
    dropout: float,
    saved_modules: list[str] | None = None,
    ties_weights: bool = False,
    is_critic: bool = False,
) -> dict[str, Any]:
    """Return the fields of a config; the most common rank and alpha are `r` and `lora_alpha`.

    Args:
        sizes: LoRA sizes by names of modules and parameters.
        modules: names of the adapted modules.
        parameters: names of the adapted parameters.
        base: path or hub id of the base checkpoint.
        dropout: `lora_dropout`, which PEFT applies in training.
        saved_modules: full names of the modules that are stored whole.
        ties_weights: whether one of them is an embedding tied to the head.
        is_critic: whether the base gets a value head.
    """
    hub_id = None if Path(base).exists() else parse_hub_id(base)
    base, revision = hub_id or (base, None)
    rank = Counter(size.rank for size in sizes.values()).most_common(1)[0][0]
    alpha = Counter(size.alpha for size in sizes.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "peft_version": WRITTEN_PEFT_VERSION,
        "task_type": "SEQ_CLS" if is_critic else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": _integer(alpha),
        "use_rslora": next(iter(sizes.values())).rslora,
        "use_dora": next(iter(sizes.values())).dora,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": {name: size.rank for name, size in sizes.items() if size.rank != rank},
        "alpha_pattern": {name: _integer(size.alpha) for name, size in sizes.items() if size.alpha != alpha},
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": saved_modules or None,
        "ensure_weight_tying": ties_weights,
        "inference_mode": True,
    }


def fused_size(sizes: list[LoRASize], rank: int) -> LoRASize | None:
    """Return the size of one LoRA of this rank with the scale of all `sizes`; None if their scales differ."""
    first = sizes[0]
    if any(not math.isclose(size.scale, first.scale, rel_tol=1e-12) for size in sizes):
        return None
    factor = rank / first.rank
    alpha = first.alpha * (math.sqrt(factor) if first.rslora else factor)
    return LoRASize(rank, alpha, first.rslora, dora=first.dora)


def _integer(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha
