"""Arguments and checkpoint names of families with Mamba-2 layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.args.base import BaseModelArgs
from archon.models.hf.checks import check_kind, reject_field, require
from archon.models.hf.config import Field
from archon.models.hf.fused_tensors import Fused
from archon.models.layers.feed_forward import get_activation
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
        mamba_hidden_act: Activation after the convolution; empty means `hidden_act`.
        layer_types: Kind of each layer; empty means Mamba-2 in every layer.
        layer_kinds: Kinds of layers in the family.
    """

    mamba_heads: int = 128
    mamba_groups: int = 1
    mamba_head_dim: int = 64
    mamba_state_dim: int = 256
    mamba_kernel_size: int = 4
    mamba_bias: bool = False
    mamba_conv_bias: bool = True
    mamba_dt_limits: tuple[float, float] = (0.0, float("inf"))
    mamba_hidden_act: str = ""
    layer_types: tuple[str, ...] = ()

    layer_kinds: ClassVar[tuple[str, ...]] = (MAMBA, ATTENTION)

    def __post_init__(self) -> None:
        self.layer_types = tuple(self.layer_types) or (MAMBA,) * self.n_layers
        low, high = self.mamba_dt_limits
        self.mamba_dt_limits = (low, high)
        super().__post_init__()
        if len(self.layer_types) != self.n_layers or {*self.layer_types} - {*self.layer_kinds}:
            raise ConfigError(
                f"layer_types is {self.layer_types}; expected {' or '.join(self.layer_kinds)} for each of "
                f"{self.n_layers} layers",
                field="layer_types",
            )
        get_activation(self.mamba_hidden_act or self.hidden_act, "mamba_hidden_act")  # raises for an unknown name
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
            self.mamba_hidden_act or self.hidden_act,
            self.mamba_bias,
            self.mamba_conv_bias,
            self.mamba_dt_limits,
        )


@dataclass
class ExpandedMambaModelArgs(MambaModelArgs):
    """Arguments of a decoder whose configs give the width of Mamba-2 layers by `mamba_expand`, see `MambaModelArgs`."""

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
            extra = extra | {"mamba_dt_limits": read_step_limits(limits)}
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


def read_step_limits(limits: Any) -> tuple[float, float]:
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


def mamba_map(hf: str) -> dict[str, str | Fused | None]:
    """Return the names of a Mamba-2 mixer whose Hugging Face prefix is `hf`."""
    native = "layers.{}.mamba."
    return {
        **{
            f"{hf}in_proj.{part}": Fused(tuple(f"{native}{name}.{part}" for name in ("wz", "wx", "wb", "wc", "wdt")))
            for part in ("weight", "bias")
        },
        **{
            f"{hf}conv1d.{part}": Fused(tuple(f"{native}{name}_conv.{part}" for name in "xbc"))
            for part in ("weight", "bias")
        },
        **{f"{hf}{name}": f"{native}step.{name}" for name in ("A_log", "dt_bias", "D")},
        f"{hf}norm.weight": f"{native}norm.weight",
        f"{hf}out_proj.weight": f"{native}wo.weight",
        f"{hf}out_proj.bias": f"{native}wo.bias",
    }
