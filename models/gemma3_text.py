"""Gemma 3's text decoder (Gemma team 2025, arXiv:2503.19786): pre- and post-norms, and sliding windows."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.composite import LlavaStateDictAdapter
from archon.models.hf.config import ATTENTION_BIAS, CompositePolicy, Field, dense_fields, layer_type_windows
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.spec import NormPlacement
from archon.models.spec import define_family

# The published config of the model with 4B parameters leaves out the last two fields.
_FIELDS = dense_fields(
    num_key_value_heads=4,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    pad_token_id=0,
    num_attention_heads=8,
    vocab_size=262208,
) | {
    "hidden_activation": Field("hidden_act", str, "gelu_pytorch_tanh"),
    "head_dim": Field("head_dim", int, 256),
    **ATTENTION_BIAS,
    "query_pre_attn_scalar": Field("query_pre_attn_scalar", int, 256),
    "final_logit_softcapping": Field("logits_soft_cap", float, None, null=None),
}
_IMAGE_FIELDS = (
    "vision_config",
    "mm_tokens_per_image",
    "image_token_index",
    "boi_token_index",
    "eoi_token_index",
    "initializer_range",  # of the projector
)
_NORMS = {
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_post_norm.weight",
    "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.ffn_post_norm.weight",
}


@dataclass
class Gemma3TextModelArgs(BaseModelArgs):
    """Arguments of Gemma 3, see `BaseModelArgs`; `query_pre_attn_scalar`^(-1/2) scales the attention scores."""

    query_pre_attn_scalar: int = 256
    qk_norm: bool = True
    norm_offset: float = 1.0
    norm_placement: NormPlacement = "both"
    embedding_multiplier_is_rounded: bool = True

    model_types = frozenset({"gemma3_text", "gemma3"})
    composite_types = {"gemma3": "gemma3_text"}
    hf_composite = CompositePolicy(_IMAGE_FIELDS, ties=True, unset=("final_logit_softcapping",))
    biases_all_projections = True
    hf_windows = layer_type_windows(default=4096, pattern=6, pattern_field="sliding_window_pattern")
    hf_ropes = RopePolicy(theta=1_000_000.0, local_theta=10_000.0, local_theta_field="rope_local_base_freq")
    # transformers reads attn_logit_softcapping and does not apply it; no published Gemma 3 has it.
    hf_fixed_values = {"use_bidirectional_attention": False, "attn_logit_softcapping": None}
    # Random QK norm factors are about 2; smaller divisors saturate the attention of small models.
    hf_examples = {"query_pre_attn_scalar": (64, 100)}
    hf_fields = {name: field for name, field in _FIELDS.items() if name != "hidden_act"}

    def __post_init__(self) -> None:
        self.attention_scale = self.query_pre_attn_scalar**-0.5
        self.embedding_multiplier = self.dim**0.5
        super().__post_init__()


Gemma3TextModel = BaseArchonModel[Gemma3TextModelArgs]
Gemma3TextStateDictAdapter, parallelize_gemma3_text, SPEC = define_family(
    "gemma3_text", Gemma3TextModel, DENSE_HF_MAP | QK_NORM_HF_MAP | _NORMS, adapter=LlavaStateDictAdapter
)
