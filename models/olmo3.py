"""OLMo 3 (Ai2 2025): norms after attention and network, norms over all queries and all keys, and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, WindowPolicy, dense_fields, layer_type_windows
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.rope import RopeSpec
from archon.models.layers.spec import NormPlacement
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class Olmo3ModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; `attention_bias` puts biases on all four projections, RoPE scaling is of full layers."""

    qk_norm: bool = True
    full_width_qk_norm: bool = True
    norm_rounds_once: bool = True
    norm_placement: NormPlacement = "after"

    model_types: ClassVar[frozenset[str]] = frozenset({"olmo3"})
    hf_windows: ClassVar[WindowPolicy] = layer_type_windows(default=4096, pattern=4)
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(theta=500_000.0, local_theta=500_000.0)
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(
        num_key_value_heads=0, max_position_embeddings=2048, rms_norm_eps=1e-5, pad_token_id=1
    ) | {
        # transformers' OLMo 3 uses `head_dim`, which its config class does not declare.
        "head_dim": Field("head_dim", int, 0),
        "attention_bias": Field("attention_bias", bool, False),
    }

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        super().__post_init__()

    def rope(self, layer: int) -> RopeSpec | None:
        """See `BaseModelArgs.rope`; cos and sin stay in float32."""
        spec = super().rope(layer)
        return None if spec is None else replace(spec, rounds_once=True)


class Olmo3Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Olmo3ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Olmo3ModelArgs


class Olmo3StateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders, and the norms of queries and keys and of what layers add."""

    model_class = Olmo3Model
    from_hf_map = (
        DENSE_HF_MAP
        | QK_NORM_HF_MAP
        | {
            "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_post_norm.weight",
            "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.ffn_post_norm.weight",
        }
    )


parallelize_olmo3 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("olmo3", Olmo3StateDictAdapter, parallelize_olmo3)
