"""Reader of RoPE parameters from Hugging Face configs in the old and the new form.

The old form has `rope_theta` and `rope_scaling`. transformers 5 merges both into `rope_parameters`, either for all
layers or per kind of layer in families with a separate RoPE for sliding layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from archon.models.hf.checks import check_kind, reject_field
from archon.models.layers.rope import RopeConfig
from archon.schema.errors import ConfigError

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of layers in `rope_parameters`."""

# Type of each RoPE field, and the RoPE types that use it (transformers' `_validate_*_rope_parameters`). A `tuple` field
# is a list of numbers.
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
_DIVISORS = {"factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"}
"""Fields that divide frequencies or lengths: 0 has no quotient, and a negative one rotates backwards."""
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}


# M-RoPE fields of image positions; text positions have one coordinate.
MROPE_FIELDS = frozenset({"mrope_section", "mrope_interleaved"})


@dataclass(frozen=True)
class RopePolicy:
    """Rule that derives the RoPEs of the layers from a family's config.

    Attributes:
        theta: Default base of the frequencies.
        kinds: Supported RoPE types; None for all.
        aliases: Further names of RoPE types.
        original_length: Default of the top-level `original_max_position_embeddings`; None means the context length.
        parameters: Default `rope_parameters`.
        local_theta: Default base of sliding layers in families with `rope_parameters` per kind of layer; None for
            families with one RoPE.
        local_theta_field: Top-level field with that base.
        partial: Default of `partial_rotary_factor`, the rotated fraction of a head's features; None for families that
            rotate all features and reject other fractions.
        rotary_dim_field: Top-level field with the number of rotated features; `partial_rotary_factor` overrides it.
        query_beta_field: Field of `rope_parameters` with `RopeSpec.query_beta`, if the family has it.
        ignored: Fields of `rope_parameters` without effect.
        fields: Config fields that `positions` reads.
        positions: Maps the config and the number of layers to a flag per layer, true with RoPE; None for RoPE in all.
    """

    theta: float = 10_000.0
    kinds: tuple[str, ...] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
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
        """Top-level config fields that the policy reads."""
        known = {"rope_theta", "rope_scaling", "rope_parameters", *self.fields}
        known |= {name for name in (self.local_theta_field, self.rotary_dim_field) if name is not None}
        # transformers does not read it in configs with parameters per kind of layer.
        known |= {_ORIGINAL_LENGTH} if self.local_theta is None else set()
        return frozenset(known if self.partial is None else known | {"partial_rotary_factor"})

    def read(self, config: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
        """Read the RoPE arguments, by native name, from a config and the other model arguments."""
        source, parameters = self._parameters(config)
        length, n_layers = args["max_seq_len"], args["n_layers"]
        if self.local_theta is None:
            rope = _Rope(self, config, source, parameters, length, "rope_theta", self.theta)
            arguments = rope.arguments() | self._rotary_dim(rope, args)
            if self.positions is not None:
                rotated = self.positions(config, n_layers)
                arguments["layer_ropes"] = tuple("global" if rotates else "none" for rotates in rotated)
            return arguments
        by_kind = self._by_kind(source, parameters)
        names = {kind: source if source == "rope_scaling" else f"{source}.{kind}" for kind in by_kind}
        rope = _Rope(self, config, names[GLOBAL], by_kind[GLOBAL], length, "rope_theta", self.theta)
        local = _Rope(self, config, names[LOCAL], by_kind[LOCAL], length, self.local_theta_field, self.local_theta)
        if self.local_theta_field is None and "rope_theta" not in by_kind[LOCAL] and rope.theta != local.theta:
            expected = f"set rope_theta per kind of layer in rope_parameters, or {local.theta:g} for both"
            reject_field("rope_theta", rope.theta, expected)
        windows = args["layer_windows"]
        return {
            **rope.arguments(),
            "local_rope_theta": local.theta,
            "local_rope_scaling": local.scaling,
            "layer_ropes": tuple("global" if window is None else "local" for window in windows),
        }

    def _parameters(self, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the name and value of the field that holds the parameters."""
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
        """Return the parameters per kind of layer; the old form describes layers without a window."""
        if source == "rope_scaling":
            if "rope_type" not in parameters:  # transformers 5 ignores `type` here
                reject_field(source, parameters, "expected a dictionary with a rope_type")
            return {GLOBAL: parameters, LOCAL: {}}
        for kind, value in parameters.items():
            if kind not in (GLOBAL, LOCAL) or not isinstance(value, Mapping | None):
                expected = f"expected {GLOBAL} and {LOCAL}, each with the parameters of such layers"
                reject_field(f"{source}.{kind}", value, expected)
        return {kind: parameters.get(kind) or {} for kind in (GLOBAL, LOCAL)}

    def _rotary_dim(self, rope: _Rope, args: Mapping[str, Any]) -> dict[str, int]:
        """Return the argument `rotary_dim` of a family with partial rotation."""
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
            expected = f"expected a fraction that rotates an even number of a head's {head_dim} features, at least 2"
            reject_field("partial_rotary_factor", fraction, expected)
        return {"rotary_dim": rotary_dim}


class _Rope:
    """RoPE parameters of a config: `theta`, `scaling`, and `partial`, the rotated fraction of the features if set.

    `theta_field` is the top-level field with the base; None for none.
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
        remaining = {name: value for name, value in parameters.items() if name not in policy.ignored}
        kinds = [remaining.pop(key) for key in ("rope_type", "type") if key in remaining] or ["default"]
        kinds = [policy.aliases.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        kind, known = kinds[0], _REQUIRED if policy.kinds is None else policy.kinds
        if kind != kinds[-1] or not isinstance(kind, str) or kind not in known:
            reject_field(f"{source}.rope_type", kind, f"expected one of {', '.join(known)}, set once")
        self.theta = self._theta(remaining.pop("rope_theta", None), theta_field, theta)
        name = policy.query_beta_field
        self.query_beta = None if name is None else check_kind(f"{source}.{name}", remaining.pop(name, None), float)
        self.partial: float | None = None
        proportion = 1.0
        if "partial_rotary_factor" in remaining:
            self.partial = proportion = self._partial(kind, remaining.pop("partial_rotary_factor"))
        values = self._values(kind, remaining)
        if kind == "proportional":
            values["proportion"] = proportion
        if kind in _SCALING_FIELDS[_ORIGINAL_LENGTH][1]:
            # Precedence: the top-level field, the inner field, max_position_embeddings.
            inner, outer = values.pop(_ORIGINAL_LENGTH, None), config.get(_ORIGINAL_LENGTH, policy.original_length)
            length = max_seq_len if inner is None else inner
            length = length if outer is None else check_kind(_ORIGINAL_LENGTH, outer, int)
            if not 1 <= length <= _LONGEST:
                reject_field(_ORIGINAL_LENGTH, length, f"expected 1 to {_LONGEST} tokens")
            values["original_max_seq_len"] = length
        self.scaling = RopeConfig(**values)

    def arguments(self) -> dict[str, Any]:
        """Return theta, scaling and the query factor, by native name."""
        arguments = {"rope_theta": self.theta, "rope_scaling": self.scaling}
        if self.policy.query_beta_field is None:
            return arguments
        if self.scaling.original_max_seq_len is None:
            expected = f"expected a type with {_ORIGINAL_LENGTH}, the period of {self.policy.query_beta_field}"
            reject_field(f"{self.source}.rope_type", self.scaling.kind, expected)
        return arguments | {"query_beta": self.query_beta}

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

    def _values(self, kind: str, remaining: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `RopeConfig`; the original context length keeps its config name."""
        values: dict[str, Any] = {"kind": kind}
        for name, value in remaining.items():
            value_kind, used_by = _SCALING_FIELDS.get(name, (float, set()))
            if kind not in used_by:
                reject_field(f"{self.source}.{name}", value, f"RoPE of type {kind!r} has no such field; remove it")
            values[name] = None if value is None else _value(f"{self.source}.{name}", value, value_kind)
            numbers = values[name] if value_kind is tuple else (values[name],)
            if name in _DIVISORS and value is not None and min(numbers, default=1) <= 0:
                reject_field(f"{self.source}.{name}", value, "expected only numbers above 0")
        for name in _REQUIRED[kind]:
            nullable = kind == "yarn"
            if name not in remaining or (remaining[name] is None and not nullable):
                raise ConfigError(f"config field {self.source!r} lacks {name!r}, which RoPE of type {kind!r} needs")
        low, high = values.get("low_freq_factor"), values.get("high_freq_factor")
        if low is not None and high is not None and high <= low:
            reject_field(f"{self.source}.high_freq_factor", high, f"expected more than low_freq_factor, {low!r}")
        if (truncate := values.get("truncate", True)) is None:
            reject_field(f"{self.source}.truncate", None, "expected true or false")
        if not truncate and self.policy.local_theta is not None:
            expected = "transformers ignores it in parameters per kind of layer; remove it"
            reject_field(f"{self.source}.truncate", truncate, expected)
        return values


def _value(name: str, value: Any, kind: type) -> Any:
    if kind is not tuple:
        return check_kind(name, value, kind)
    if not isinstance(value, (list, tuple)):
        reject_field(name, value, "expected a list of numbers")
    return tuple(check_kind(name, item, float) for item in value)
