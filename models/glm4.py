"""GLM-4-0414 (Z.ai 2025): dense decoder with partial interleaved RoPE, and norms before and after each sublayer."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, FUSED_GATE_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.spec import NormPlacement
from archon.models.spec import define_family


@dataclass
class Glm4ModelArgs(BaseModelArgs):
    """Arguments of GLM-4-0414, see `BaseModelArgs`."""

    attention_bias: bool = True
    rope_interleaved: bool = True
    norm_placement: NormPlacement = "both"

    model_types = frozenset({"glm4"})
    hf_ropes = RopePolicy(partial=0.5)
    hf_fields = dense_fields(
        num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=1.5625e-07, pad_token_id=151329
    ) | {
        "head_dim": Field("head_dim", int, 128),
        "attention_bias": Field("attention_bias", bool, True),
    }
    # RoPE rotates half of the features, which must be an even number.
    hf_examples = {"head_dim": (8, 12, 16)}


# `post_attention_layernorm` is the norm before the feed-forward network, as in Llama.
_POST_NORMS = {
    "model.layers.{}.post_self_attn_layernorm.weight": "layers.{}.attention_post_norm.weight",
    "model.layers.{}.post_mlp_layernorm.weight": "layers.{}.ffn_post_norm.weight",
}

Glm4Model = BaseArchonModel[Glm4ModelArgs]
Glm4StateDictAdapter, parallelize_glm4, SPEC = define_family(
    "glm4", Glm4Model, DENSE_HF_MAP | FUSED_GATE_HF_MAP | _POST_NORMS
)
