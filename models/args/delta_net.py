"""Arguments and checkpoint names of Qwen3-Next and Qwen3.5: gated delta nets and gated attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from archon.models.args.base import BaseModelArgs
from archon.models.hf.checks import reject_field, require
from archon.models.hf.config import ATTENTION_BIAS, Field
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.delta_net import DeltaNetLayer
from archon.models.layers.delta_rule import DeltaRule
from archon.models.layers.norm import NormSpec
from archon.models.layers.spec import LayerSpec, MixerSpec
from archon.schema.errors import ConfigError

DELTA_NET, ATTENTION = "linear_attention", "full_attention"
"""Kinds of layers, by their Hugging Face names."""


@dataclass
class DeltaNetModelArgs(BaseModelArgs):
    """Arguments of a decoder that alternates gated delta nets and gated attention.

    Attributes:
        delta_heads, delta_key_heads: Value heads of a delta net, and key heads, which divide them.
        delta_value_dim, delta_key_dim: Features of a head's values, and of its keys.
        delta_kernel_size: Tokens in the convolution's receptive field.
        delta_rule: Implementation, see `archon.models.layers.delta_rule.DeltaRule`; not part of a checkpoint.
        layer_types: Kind of each layer; empty means attention in every `attention_interval`-th layer.
    """

    delta_heads: int = 32
    delta_key_heads: int = 16
    delta_value_dim: int = 128
    delta_key_dim: int = 128
    delta_kernel_size: int = 4
    delta_rule: DeltaRule = "torch"
    layer_types: tuple[str, ...] = ()
    attention_interval: int = 4
    qk_norm: bool = True
    norm_offset: float = 1.0
    attention_gated: bool = True

    biases_all_projections: ClassVar[bool] = True
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(partial=0.25)
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = {
        "full_attention_interval": (2, 2, 3),
        "linear_num_value_heads": (4, 8),
        "linear_num_key_heads": (1, 2, 4),
        "linear_value_head_dim": (8, 12, 16),
        "linear_key_head_dim": (8, 12, 16),
        "linear_conv_kernel_dim": (2, 3, 4),
        # Queries, keys and outputs are divided by their norms. An output is near 0 if query and keys are orthogonal;
        # with a small epsilon transformers itself then differs from its float64 value by up to 7e-4.
        "rms_norm_eps": (0.1,),
        "initializer_range": (0.08,),
    }

    def __post_init__(self) -> None:
        every = self.attention_interval
        self.layer_types = tuple(self.layer_types) or tuple(
            ATTENTION if (layer + 1) % every == 0 else DELTA_NET for layer in range(self.n_layers)
        )
        super().__post_init__()
        if len(self.layer_types) != self.n_layers or {*self.layer_types} - {DELTA_NET, ATTENTION}:
            raise ConfigError(
                f"layer_types is {self.layer_types}; expected {DELTA_NET} or {ATTENTION} for each of {self.n_layers} "
                "layers",
                field="layer_types",
            )
        for name in ("delta_heads", "delta_key_heads", "delta_value_dim", "delta_key_dim", "delta_kernel_size"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; expected at least 1")
        heads, key_heads = self.delta_heads, self.delta_key_heads
        require(heads % key_heads == 0, f"delta_key_heads is {key_heads}; expected a divisor of delta_heads {heads}")

    def mixer(self, layer: int) -> MixerSpec:
        """See `BaseModelArgs.mixer`."""
        if self.layer_types[layer] == ATTENTION:
            return super().mixer(layer)
        return DeltaNetLayer(
            self.delta_heads,
            self.delta_key_heads,
            self.delta_key_dim,
            self.delta_value_dim,
            self.delta_kernel_size,
            NormSpec(self.norm_eps),
            self.hidden_act,
            self.delta_rule,
        )

    def mtp_layer(self) -> LayerSpec:
        """See `BaseModelArgs.mtp_layer`; its mixer is gated attention."""
        return replace(super().mtp_layer(), mixer=super().mixer(self.n_layers - 1))

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `BaseModelArgs.decoder_config`."""
        config, extra = super().decoder_config(config)
        layer_types = config.pop("layer_types", None)
        if not isinstance(layer_types, list | tuple | None) or layer_types == []:
            reject_field("layer_types", layer_types, "expected a list with the kind of each layer, or null")
        return config, extra | {"layer_types": tuple(layer_types or ())}


DELTA_NET_FIELDS = {
    "head_dim": Field("head_dim", int, 256),
    **ATTENTION_BIAS,
    "full_attention_interval": Field("attention_interval", int, 4),
    "linear_num_value_heads": Field("delta_heads", int, 32),
    "linear_num_key_heads": Field("delta_key_heads", int, 16),
    "linear_value_head_dim": Field("delta_value_dim", int, 128),
    "linear_key_head_dim": Field("delta_key_dim", int, 128),
    "linear_conv_kernel_dim": Field("delta_kernel_size", int, 4),
}
# Multi-token-prediction layers are passthrough tensors.
MTP_FIELDS = {
    "mtp_num_hidden_layers": Field("", int, 0, minimum=0),
    "mtp_use_dedicated_embeddings": Field("", bool, False),
}


_HF, _NATIVE = "model.layers.{}.linear_attn.", "layers.{}.delta_net."
# Names in the checkpoints of all these families.
DELTA_NET_HF_MAP: dict[str, str | Fused | None] = {
    **DENSE_HF_MAP,
    **QK_NORM_HF_MAP,
    f"{_HF}conv1d.weight": Fused(tuple(f"{_NATIVE}{part}_conv.weight" for part in "qkv")),
    f"{_HF}A_log": f"{_NATIVE}decay.A_log",
    f"{_HF}dt_bias": f"{_NATIVE}decay.dt_bias",
    f"{_HF}norm.weight": f"{_NATIVE}norm.weight",
    f"{_HF}out_proj.weight": f"{_NATIVE}wo.weight",
}
# Qwen3.5 stores one matrix per projection.
QWEN3_5_HF_MAP: dict[str, str | Fused | None] = {
    **DELTA_NET_HF_MAP,
    f"{_HF}in_proj_qkv.weight": Fused(tuple(f"{_NATIVE}w{part}.weight" for part in "qkv")),
    f"{_HF}in_proj_z.weight": f"{_NATIVE}wz.weight",
    f"{_HF}in_proj_b.weight": f"{_NATIVE}wb.weight",
    f"{_HF}in_proj_a.weight": f"{_NATIVE}wa.weight",
}
# Qwen3-Next interleaves its projections in blocks of one key head and its value heads.
DELTA_NET_BLOCKS_HF_MAP: dict[str, str | Fused | None] = {
    f"{_HF}in_proj_qkvz.weight": Fused(
        tuple(f"{_NATIVE}w{part}.weight" for part in "qkvz"), blocks=lambda args: args.delta_key_heads
    ),
    f"{_HF}in_proj_ba.weight": Fused(
        tuple(f"{_NATIVE}w{part}.weight" for part in "ba"), blocks=lambda args: args.delta_key_heads
    ),
}
