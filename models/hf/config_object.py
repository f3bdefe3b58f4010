"""Config object for a hand-written `from_hf_config`, and the fields that such a reader leaves out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from archon.models.hf.checks import reject_field
from archon.models.hf.config import DENSE_FIELDS, DROPOUTS, FIXED_VALUES, NO_EFFECT, as_dict, read_field
from archon.models.hf.quantization import FIELD as QUANTIZATION_FIELD
from archon.schema.errors import ConfigError, FamilyError

_DISABLED = {"use_sliding_window": False, "mlp_bias": False, "pretraining_tp": 1}
"""Fields of dense decoders that have no effect with these values."""
_SET_BY_THE_ENGINE = frozenset({"router_aux_loss_coef"})
"""Fields that archon sets in the run configuration instead of the model."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Aliases of one field: transformers may write another alias than a family reads."""
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


class MissingFieldError(ConfigError, AttributeError):
    """Config field that a family reads as an attribute and that the config lacks."""


class HFConfig(Mapping[str, Any]):
    """Config with its fields as keys and as attributes, like a transformers config.

    The attributes `rope_theta`, `rope_scaling` and `rope_parameters` exist in both RoPE styles, and the number of
    experts under all its names. The object records the fields that are read.

    Args:
        hf_config: A parsed `config.json`, a transformers config, or a mock of one.
    """

    def __init__(self, hf_config: Any) -> None:
        self._values = as_dict(hf_config)
        self._object = hf_config if type(hf_config).__module__.startswith("transformers") else None
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            value = self[name]
            return HFConfig(value) if name.endswith("_config") and isinstance(value, Mapping) else value
        if name in _ROPE_FIELDS and name in (rope := self._rope_attributes()):
            self._read |= {"rope_theta"} if name == "rope_theta" else {*_ROPE_FIELDS}
            return rope[name]
        if name in _EXPERT_COUNTS and (names := [other for other in _EXPERT_COUNTS if other in values]):
            return self[names[0]]
        if hasattr(self._object, name) and not name.startswith("__"):
            return getattr(self._object, name)
        raise MissingFieldError(f"config field {name!r} is missing; read it with getattr(hf_config, {name!r}, default)")

    def _rope_attributes(self) -> dict[str, Any]:
        """Return the RoPE fields of the other style."""
        theta, old, new = (self._values.get(name) for name in _ROPE_FIELDS)
        if new is None:
            return {"rope_parameters": {"rope_type": "default", "rope_theta": theta or 10_000.0} | (old or {})}
        scaling = {name: value for name, value in new.items() if name != "rope_theta"}
        rope = {"rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling}
        return rope | ({"rope_theta": new["rope_theta"]} if "rope_theta" in new else {})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return dict(self)

    @property
    def unread(self) -> dict[str, Any]:
        """Fields that were not read."""
        return {name: value for name, value in self._values.items() if name not in self._read}


def complete_reader(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a family's `from_hf_config`: pass it an `HFConfig`, and honor or reject the fields that it does not read."""

    @functools.wraps(read)
    def from_hf_config(cls: type, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Any:
        config = HFConfig(hf_config)
        args = read(cls, config, is_critic, **kwargs)
        if not isinstance(args, cls):
            raise FamilyError(f"{cls.__name__}.from_hf_config returned {args!r:.80}; expected a {cls.__name__}")
        return _complete(args, config, is_critic)

    return from_hf_config


def _complete(args: Any, config: HFConfig, is_critic: bool) -> Any:
    """Set the arguments of standard fields that were not read; reject other unread fields that may have an effect."""
    unread, family = config.unread, type(args)
    changes: dict[str, Any] = {"is_critic": is_critic}
    for name in DENSE_FIELDS.keys() & {*unread, *({"tie_word_embeddings"} & config.keys())}:
        changes[DENSE_FIELDS[name].native] = read_field(config, name, DENSE_FIELDS[name])
    if {*_ROPE_FIELDS} & unread.keys():
        sizes = {"max_seq_len": args.max_seq_len, "n_layers": args.n_layers, "head_dim": args.head_dim}
        rope = family.hf_ropes.read(dict(config), sizes | {"layer_windows": args.layer_windows})
        changes |= {name: rope[name] for name in ("rope_theta", "rope_scaling") if name in rope}
    known = {*DENSE_FIELDS, *_ROPE_FIELDS, *NO_EFFECT, *DROPOUTS, *_SET_BY_THE_ENGINE, QUANTIZATION_FIELD}
    n_experts = next((config[name] for name in _EXPERT_COUNTS if name in config and name not in unread), None)
    fixed = FIXED_VALUES | _DISABLED | family.hf_fixed_values
    windows = () if config.get("use_sliding_window", True) else ("sliding_window", "max_window_layers")
    for name, value in unread.items():
        is_full = name == "layer_types" and {*(value or ())} <= {"full_attention"}
        is_alias = name in _EXPERT_COUNTS and value == n_experts
        if value is None or name in known or name in windows or is_full or is_alias:
            continue
        if (name in fixed and value == fixed[name]) or getattr(args, name, None) == value:
            continue
        expected = f"{family.__name__}.from_hf_config does not read it; read it, or list the value in hf_fixed_values"
        reject_field(name, value, expected)
    return replace(args, **changes)
