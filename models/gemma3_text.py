"""Gemma 3's text decoder (Gemma team 2025, arXiv:2503.19786): norms before and after, and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, WindowPolicy, dense_fields, layer_type_windows
from archon.models.hf.fused_tensors import Fused
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.spec import NormPlacement
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec

_FIELDS = dense_fields(
    num_key_value_heads=4, max_position_embeddings=131072, tie_word_embeddings=True, pad_token_id=0
) | {
    "hidden_activation": Field("hidden_act", str, "gelu_pytorch_tanh"),
    "head_dim": Field("head_dim", int, 256),
    "attention_bias": Field("attention_bias", bool, False),
    "query_pre_attn_scalar": Field("query_pre_attn_scalar", int, 256),
    "final_logit_softcapping": Field("logits_soft_cap", float, None, null=None),
}
_NORMS_HF_MAP: dict[str, str | Fused | None] = {
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_post_norm.weight",
    "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.ffn_post_norm.weight",
}


@dataclass
class Gemma3TextModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; attention scores are divided by the square root of `query_pre_attn_scalar`."""

    query_pre_attn_scalar: int = 256
    qk_norm: bool = True
    norm_offset: float = 1.0
    norm_placement: NormPlacement = "both"
    embedding_multiplier_is_rounded: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"gemma3_text"})
    hf_windows: ClassVar[WindowPolicy] = layer_type_windows(
        default=4096, pattern=6, pattern_field="sliding_window_pattern"
    )
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(
        theta=1_000_000.0, local_theta=10_000.0, local_theta_field="rope_local_base_freq"
    )
    # transformers reads attn_logit_softcapping and does not apply it; no published Gemma 3 has it.
    hf_fixed_values: ClassVar[dict[str, Any]] = {"use_bidirectional_attention": False, "attn_logit_softcapping": None}
    # Random factors of the query and key norms are about 2: with smaller divisors small models' attention saturates.
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = {"query_pre_attn_scalar": (64, 100)}
    hf_fields: ClassVar[dict[str, Field]] = {name: field for name, field in _FIELDS.items() if name != "hidden_act"}

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        self.attention_scale = self.query_pre_attn_scalar**-0.5
        self.embedding_multiplier = self.dim**0.5
        super().__post_init__()


class Gemma3TextModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Gemma3TextModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Gemma3TextModelArgs


class Gemma3TextStateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders, and the norms of queries and keys and around attention and network."""

    model_class = Gemma3TextModel
    from_hf_map = DENSE_HF_MAP | QK_NORM_HF_MAP | _NORMS_HF_MAP


parallelize_gemma3_text = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("gemma3_text", Gemma3TextStateDictAdapter, parallelize_gemma3_text)
