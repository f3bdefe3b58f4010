"""Arguments and checkpoint names of families with Mamba-2 layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from archon.models.args.base import BaseModelArgs
from archon.models.hf.checks import check_kind, reject_field, require
from archon.models.hf.config import Field
from archon.models.hf.fused_tensors import Fused
from archon.models.layers.mamba import MambaLayer
from archon.models.layers.norm import NormSpec
from archon.models.layers.spec import MixerSpec
from archon.schema.errors import ConfigError

MAMBA, ATTENTION = "linear_attention", "full_attention"
"""Kinds of layers, by their names in transformers 5."""
_KINDS = {MAMBA: MAMBA, ATTENTION: ATTENTION, "mamba": MAMBA, "attention": ATTENTION}


@dataclass
class MambaModelArgs(BaseModelArgs):
    """Arguments of a decoder with Mamba-2 layers and attention layers.

    Attributes:
        mamba_heads, mamba_groups: Heads of a Mamba-2 layer, and their groups, which divide them.
        mamba_head_dim, mamba_state_dim: See `MambaLayer`.
        mamba_kernel_size: Tokens in the convolution's receptive field.
        mamba_bias, mamba_conv_bias: Biases of the layer's projections, and of its convolution.
        mamba_dt_limits: Smallest and largest step size.
        layer_types: Kind of each layer; empty means Mamba-2 in every layer.
    """

    mamba_heads: int = 128
    mamba_groups: int = 1
    mamba_head_dim: int = 64
    mamba_state_dim: int = 256
    mamba_kernel_size: int = 4
    mamba_bias: bool = False
    mamba_conv_bias: bool = True
    mamba_dt_limits: tuple[float, float] = (0.0, float("inf"))
    layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.layer_types = tuple(self.layer_types) or (MAMBA,) * self.n_layers
        low, high = self.mamba_dt_limits
        self.mamba_dt_limits = (low, high)
        super().__post_init__()
        if len(self.layer_types) != self.n_layers or {*self.layer_types} - {MAMBA, ATTENTION}:
            raise ConfigError(
                f"layer_types is {self.layer_types}; expected {MAMBA} or {ATTENTION} for each of {self.n_layers} "
                "layers",
                field="layer_types",
            )
        for name in ("mamba_heads", "mamba_groups", "mamba_head_dim", "mamba_state_dim", "mamba_kernel_size"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; expected at least 1")
        heads, groups = self.mamba_heads, self.mamba_groups
        require(heads % groups == 0, f"mamba_groups is {groups}; expected a divisor of mamba_heads {heads}")
        require(0 <= low < high, f"mamba_dt_limits are {low} and {high}; expected 0 <= smallest < largest")

    def mixer(self, layer: int) -> MixerSpec:
        """See `BaseModelArgs.mixer`."""
        if self.layer_types[layer] == ATTENTION:
            return super().mixer(layer)
        return MambaLayer(
            self.mamba_heads,
            self.mamba_groups,
            self.mamba_head_dim,
            self.mamba_state_dim,
            self.mamba_kernel_size,
            NormSpec(self.norm_eps),
            self.hidden_act,
            self.mamba_bias,
            self.mamba_conv_bias,
            self.mamba_dt_limits,
        )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `BaseModelArgs.decoder_config`; `mamba_expand` determines the features of a head."""
        config, extra = super().decoder_config(config)
        kinds, limits = config.pop("layer_types", None), config.pop("time_step_limit", None)
        if kinds is not None:
            if not isinstance(kinds, list | tuple) or not kinds or not all(kind in [*_KINDS] for kind in kinds):
                reject_field("layer_types", kinds, f"expected {' or '.join(_KINDS)} for each layer, or null")
            extra = extra | {"layer_types": tuple(_KINDS[kind] for kind in kinds)}
        if limits is not None:
            extra = extra | {"mamba_dt_limits": _read_limits(limits)}
        expand, head_dim = config.pop("mamba_expand", 2), config.pop("mamba_d_head", "auto")
        dim, heads = (
            check_kind(name, config.get(name, default), int)
            for name, default in (("hidden_size", 4096), ("mamba_n_heads", 128))
        )
        inner = check_kind("mamba_expand", expand, int) * dim
        if heads < 1 or inner % heads or inner < heads:
            reject_field("mamba_n_heads", heads, f"expected a divisor of mamba_expand * hidden_size {inner}")
        if head_dim not in ("auto", None) and head_dim != inner // heads:
            reject_field(
                "mamba_d_head", head_dim, f"expected {inner // heads}: mamba_expand * hidden_size / mamba_n_heads"
            )
        return config, extra | {"mamba_head_dim": inner // heads}


def _read_limits(limits: Any) -> tuple[float, float]:
    """Return the smallest and the largest step size; no largest one is infinity, or transformers' text for it."""
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        reject_field("time_step_limit", limits, "expected the smallest and the largest step size")
    low, high = limits
    unlimited = high == float("inf") or high == {"__float__": "Infinity"}
    low, high = (check_kind("time_step_limit", x, float) for x in (low, 0.0 if unlimited else high))
    return low, float("inf") if unlimited else high


# Fields of Granite's configs; the size of a chunk does not change results.
MAMBA_FIELDS = {
    "mamba_n_heads": Field("mamba_heads", int, 128),
    "mamba_n_groups": Field("mamba_groups", int, 1),
    "mamba_d_state": Field("mamba_state_dim", int, 256),
    "mamba_d_conv": Field("mamba_kernel_size", int, 4),
    "mamba_chunk_size": Field("", int, 256),
    "mamba_conv_bias": Field("mamba_conv_bias", bool, True),
    "mamba_proj_bias": Field("mamba_bias", bool, False),
}
MAMBA_EXAMPLES: dict[str, tuple[Any, ...]] = {
    "mamba_n_heads": (4, 8),
    "mamba_n_groups": (1, 2, 4),
    "mamba_d_state": (8, 12, 16),
    "mamba_d_conv": (2, 3, 4),
    "mamba_chunk_size": (8, 256),
    "time_step_limit": ([0.0, float("inf")], [0.3, 0.9], [0.0, 1.1]),
    # A group's output is near 0 if its gate is; with a small epsilon the norm magnifies rounding.
    "rms_norm_eps": (0.1,),
}
_HF, _NATIVE = "model.layers.{}.mamba.", "layers.{}.mamba."
MAMBA_HF_MAP: dict[str, str | Fused | None] = {
    **{
        f"{_HF}in_proj.{part}": Fused(tuple(f"{_NATIVE}{name}.{part}" for name in ("wz", "wx", "wb", "wc", "wdt")))
        for part in ("weight", "bias")
    },
    **{
        f"{_HF}conv1d.{part}": Fused(tuple(f"{_NATIVE}{name}_conv.{part}" for name in "xbc"))
        for part in ("weight", "bias")
    },
    **{f"{_HF}{name}": f"{_NATIVE}step.{name}" for name in ("A_log", "dt_bias", "D")},
    f"{_HF}norm.weight": f"{_NATIVE}norm.weight",
    f"{_HF}out_proj.weight": f"{_NATIVE}wo.weight",
    f"{_HF}out_proj.bias": f"{_NATIVE}wo.bias",
}
