"""Reads the rotations of a model's layers from a Hugging Face config, in its old and its new form.

The old form is `rope_theta` and `rope_scaling`. Since transformers 5 `rope_parameters` has both, for all layers, or by
kind of layer in families whose layers with a sliding window have a rotation of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from archon.models.hf.checks import check_kind, reject_field
from archon.models.layers.rope import RopeConfig
from archon.schema.errors import ConfigError

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""The keys of `rope_parameters` by kind of layer."""

# Type of each RoPE field, and the RoPE types that use it (transformers' `_validate_*_rope_parameters`). A tuple is read
# from a list of numbers.
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_LONGEST = 2**40
_SCALING_FIELDS: dict[str, tuple[type, set[str]]] = {
    "factor": (float, {"linear", "dynamic", "yarn", "llama3", "longrope", "proportional"}),
    _ORIGINAL_LENGTH: (int, {"yarn", "llama3", "longrope"}),
    "attention_factor": (float, {"yarn", "longrope"}),
    "beta_fast": (float, {"yarn"}),
    "beta_slow": (float, {"yarn"}),
    "mscale": (float, {"yarn"}),
    "mscale_all_dim": (float, {"yarn"}),
    "truncate": (bool, {"yarn"}),
    "low_freq_factor": (float, {"llama3"}),
    "high_freq_factor": (float, {"llama3"}),
    "short_factor": (tuple, {"longrope"}),
    "long_factor": (tuple, {"longrope"}),
}
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}


# They say how positions of images are laid out; those of text have one coordinate.
MROPE_FIELDS = frozenset({"mrope_section", "mrope_interleaved"})


@dataclass(frozen=True)
class RopePolicy:
    """How a family's config gives the rotations of its layers.

    Attributes:
        theta: base of the frequencies where the config has none.
        kinds: the types of RoPE that the family has; None for all.
        original_length: the top-level `original_max_position_embeddings` of a config without it; None where the context
            length stands for it.
        parameters: the `rope_parameters` of a config without any.
        local_theta: the base of layers with a sliding window where the config has none, in families whose
            `rope_parameters` are by kind of layer; None for families with one rotation.
        local_theta_field: the top-level field with that base.
        partial: the share of a head's features that is rotated where the config has no `partial_rotary_factor`; None
            for families that rotate all and reject any other share.
        rotary_dim_field: the top-level field with the number of rotated features, which `partial_rotary_factor` wins
            over.
        query_beta_field: the field of `rope_parameters` with `RopeSpec.query_beta`, in families that have it.
        ignored: fields of `rope_parameters` without effect.
        fields: the config fields that `positions` reads.
        positions: from the config and the number of layers to which layers are rotated; None for all.
    """

    theta: float = 10_000.0
    kinds: tuple[str, ...] | None = None
    original_length: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    local_theta: float | None = None
    local_theta_field: str | None = None
    partial: float | None = None
    rotary_dim_field: str | None = None
    query_beta_field: str | None = None
    ignored: frozenset[str] = frozenset()
    fields: tuple[str, ...] = ()
    positions: Callable[[Mapping[str, Any], int], Sequence[bool]] | None = None

    @property
    def known_fields(self) -> frozenset[str]:
        """The top-level config fields that it reads."""
        known = {"rope_theta", "rope_scaling", "rope_parameters", *self.fields}
        known |= {name for name in (self.local_theta_field, self.rotary_dim_field) if name is not None}
        # transformers does not read it in configs with parameters by kind of layer.
        known |= {_ORIGINAL_LENGTH} if self.local_theta is None else set()
        return frozenset(known if self.partial is None else known | {"partial_rotary_factor"})

    def read(self, config: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the rotations, by native name.

        `args` are the arguments that do not depend on them. Raises ConfigError, naming the field.
        """
        source, parameters = self._parameters(config)
        length, n_layers = args["max_seq_len"], args["n_layers"]
        if self.local_theta is None:
            rope = _Rope(self, config, source, parameters, length, "rope_theta", self.theta)
            found = rope.arguments() | self._rotary_dim(rope, args)
            if self.positions is not None:
                rotated = self.positions(config, n_layers)
                found["layer_ropes"] = tuple("global" if rotates else "none" for rotates in rotated)
            return found
        by_kind = self._by_kind(source, parameters)
        names = {kind: source if source == "rope_scaling" else f"{source}.{kind}" for kind in by_kind}
        rope = _Rope(self, config, names[GLOBAL], by_kind[GLOBAL], length, "rope_theta", self.theta)
        local = _Rope(self, config, names[LOCAL], by_kind[LOCAL], length, self.local_theta_field, self.local_theta)
        if self.local_theta_field is None and "rope_theta" not in by_kind[LOCAL] and rope.theta != local.theta:
            expected = f"give the rope_theta of each kind of layer in rope_parameters, or {local.theta:g} for both"
            reject_field("rope_theta", rope.theta, expected)
        windows = args["layer_windows"]
        return {
            **rope.arguments(),
            "local_rope_theta": local.theta,
            "local_rope_scaling": local.scaling,
            "layer_ropes": tuple("global" if window is None else "local" for window in windows),
        }

    def _parameters(self, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns the name of the field in use, and its value."""
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        if old and new and (old != new or self.local_theta is not None):
            reject_field("rope_scaling", old, f"it contradicts rope_parameters {new!r}; keep one")
        source = "rope_scaling" if old else "rope_parameters"
        if not old and new is None and self.parameters:
            return "the family's rope_parameters, used without rope_scaling", self.parameters
        parameters = old or new or {}
        if not isinstance(parameters, Mapping):
            reject_field(source, parameters, "expected a dictionary or null")
        return source, parameters

    def _by_kind(self, source: str, parameters: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Returns the parameters of both kinds of layers; those of the old form are of layers without a window."""
        if source == "rope_scaling":
            if "rope_type" not in parameters:  # transformers 5 overlooks `type` here
                reject_field(source, parameters, "expected a dictionary with a rope_type")
            return {GLOBAL: parameters, LOCAL: {}}
        for kind, value in parameters.items():
            if kind not in (GLOBAL, LOCAL) or not isinstance(value, Mapping | None):
                expected = f"expected {GLOBAL} and {LOCAL}, each with the parameters of such layers"
                reject_field(f"{source}.{kind}", value, expected)
        return {kind: parameters.get(kind) or {} for kind in (GLOBAL, LOCAL)}

    def _rotary_dim(self, rope: _Rope, args: Mapping[str, Any]) -> dict[str, int]:
        """Returns the argument `rotary_dim` of a family that rotates a share of each head."""
        if self.partial is None or rope.scaling.kind == "proportional":
            return {}
        head_dim = args.get("head_dim") or args["dim"] // args["n_heads"]
        fraction = rope.partial
        outer = rope.config.get("partial_rotary_factor", self.partial)
        if self.rotary_dim_field is not None and "partial_rotary_factor" not in rope.config:
            features = rope.config.get(self.rotary_dim_field)
            if features is not None:
                outer = min(check_kind(self.rotary_dim_field, features, int), 2 * head_dim) / head_dim
        if fraction is None:
            fraction = 1.0 if outer is None else check_kind("partial_rotary_factor", outer, float)
        elif rope.config.get("partial_rotary_factor", fraction) not in (None, fraction):
            reject_field("partial_rotary_factor", outer, f"it contradicts the {fraction!r} of {rope.source}; keep one")
        rotary_dim = int(head_dim * min(fraction, 2.0))
        if not 2 <= rotary_dim <= head_dim or (rotary_dim % 2 and rotary_dim < head_dim):
            expected = f"expected a share that rotates an even number of the {head_dim} features of a head, at least 2"
            reject_field("partial_rotary_factor", fraction, expected)
        return {"rotary_dim": rotary_dim}


class _Rope:
    """One rotation as a config gives it: `theta`, `scaling`, and `partial`, the share of the features, if it is there.

    `theta_field` is the top-level field with its base, None for none.
    """

    def __init__(
        self,
        policy: RopePolicy,
        config: Mapping[str, Any],
        source: str,
        parameters: Mapping[str, Any],
        max_seq_len: int,
        theta_field: str | None,
        theta: float,
    ) -> None:
        self.policy, self.config, self.source = policy, config, source
        left = {name: value for name, value in parameters.items() if name not in policy.ignored}
        kinds = [left.pop(key) for key in ("rope_type", "type") if key in left] or ["default"]
        kind = kinds[0]
        known = _REQUIRED if policy.kinds is None else policy.kinds
        if kind != kinds[-1] or not isinstance(kind, str) or kind not in known:
            reject_field(f"{source}.rope_type", kind, f"expected one of {', '.join(known)}, given once")
        self.theta = self._theta(left.pop("rope_theta", None), theta_field, theta)
        self.query_beta = self._query_beta(left)
        self.partial: float | None = None
        proportion = 1.0
        if "partial_rotary_factor" in left:
            self.partial = proportion = self._partial(kind, left.pop("partial_rotary_factor"))
        values = self._values(kind, left)
        if kind == "proportional":
            values["proportion"] = proportion
        if kind in _SCALING_FIELDS[_ORIGINAL_LENGTH][1]:
            # The top-level field, else the inner one, else max_position_embeddings.
            inner, outer = values.pop(_ORIGINAL_LENGTH, None), config.get(_ORIGINAL_LENGTH, policy.original_length)
            length = max_seq_len if inner is None else inner
            length = length if outer is None else check_kind(_ORIGINAL_LENGTH, outer, int)
            if not 1 <= length <= _LONGEST:
                reject_field(_ORIGINAL_LENGTH, length, f"expected 1 to {_LONGEST} tokens")
            values["original_max_seq_len"] = length
        self.scaling = RopeConfig(**values)

    def arguments(self) -> dict[str, Any]:
        """Returns theta, scaling and the query factor by native name."""
        found = {"rope_theta": self.theta, "rope_scaling": self.scaling}
        if self.policy.query_beta_field is None:
            return found
        if self.scaling.original_max_seq_len is None:
            expected = f"expected a type with {_ORIGINAL_LENGTH}, the period of {self.policy.query_beta_field}"
            reject_field(f"{self.source}.rope_type", self.scaling.kind, expected)
        return found | {"query_beta": self.query_beta}

    def _theta(self, inner: Any, name: str | None, default: float) -> float:
        outer = None if name is None else self.config.get(name)
        if outer is not None and inner is not None and outer != inner:
            assert name is not None
            reject_field(name, outer, f"it contradicts the {inner!r} of {self.source}; keep one")
        theta = inner if inner is not None else outer
        theta = default if theta is None else check_kind(name or "rope_theta", theta, float)
        if theta <= 1:
            reject_field(name or "rope_theta", theta, "expected a number above 1")
        return theta

    def _query_beta(self, left: dict[str, Any]) -> float | None:
        name = self.policy.query_beta_field
        return None if name is None else check_kind(f"{self.source}.{name}", left.pop(name, None), float)

    def _partial(self, kind: str, fraction: Any) -> float:
        name = f"{self.source}.partial_rotary_factor"
        if self.policy.partial is None and kind != "proportional":
            if fraction not in (None, 1, 1.0):
                reject_field(name, fraction, "archon supports only 1.0")
            return 1.0
        fraction = check_kind(name, fraction, float)
        if not 0 <= fraction <= 1:
            reject_field(name, fraction, "expected a number from 0 to 1")
        return fraction

    def _values(self, kind: str, left: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of `RopeConfig`, with the original context length under its name in configs."""
        values: dict[str, Any] = {"kind": kind}
        for name, value in left.items():
            value_kind, used_by = _SCALING_FIELDS.get(name, (float, set()))
            if kind not in used_by:
                reject_field(f"{self.source}.{name}", value, f"RoPE of type {kind!r} has no such field; remove it")
            values[name] = None if value is None else _value(f"{self.source}.{name}", value, value_kind)
        for name in _REQUIRED[kind]:
            nullable = kind == "yarn"
            if name not in left or (left[name] is None and not nullable):
                raise ConfigError(f"config field {self.source!r} lacks {name!r}, which RoPE of type {kind!r} needs")
        if (truncate := values.get("truncate", True)) is None:
            reject_field(f"{self.source}.truncate", None, "expected true or false")
        if not truncate and self.policy.local_theta is not None:
            reject_field(f"{self.source}.truncate", truncate, "transformers overlooks it by kind of layer; remove it")
        return values


def _value(name: str, value: Any, kind: type) -> Any:
    if kind is not tuple:
        return check_kind(name, value, kind)
    if not isinstance(value, (list, tuple)):
        reject_field(name, value, "expected a list of numbers")
    return tuple(check_kind(name, item, float) for item in value)
