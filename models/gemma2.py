"""Gemma 2 (Gemma team 2024, arXiv:2408.00118): pre- and post-norms, soft caps, windows in every other layer."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import ATTENTION_BIAS, Field, dense_fields, layer_type_windows
from archon.models.hf.names import DENSE_HF_MAP, POST_NORMS_HF_MAP
from archon.models.layers.spec import NormPlacement
from archon.models.spec import define_family

_FIELDS = dense_fields(num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0)


@dataclass
class Gemma2ModelArgs(BaseModelArgs):
    """Arguments of Gemma 2, see `BaseModelArgs`; `query_pre_attn_scalar`^(-1/2) scales the attention scores."""

    query_pre_attn_scalar: int = 256
    norm_offset: float = 1.0
    norm_placement: NormPlacement = "both"
    embedding_multiplier_is_rounded: bool = True

    model_types = frozenset({"gemma2"})
    biases_all_projections = True
    hf_windows = layer_type_windows(default=4096, pattern=2)
    # The published configs repeat the activation and the window under names that transformers does not read.
    hf_fixed_values = {
        "use_bidirectional_attention": False,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window_size": 4096,
    }
    hf_examples = {"query_pre_attn_scalar": (16, 36)}
    hf_fields = {name: field for name, field in _FIELDS.items() if name != "hidden_act"} | {
        "hidden_activation": Field("hidden_act", str, "gelu_pytorch_tanh"),
        "head_dim": Field("head_dim", int, 256),
        **ATTENTION_BIAS,
        "query_pre_attn_scalar": Field("query_pre_attn_scalar", int, 256),
        "final_logit_softcapping": Field("logits_soft_cap", float, 30.0, null=None),
        "attn_logit_softcapping": Field("attention_soft_cap", float, 50.0, null=None),
    }

    def __post_init__(self) -> None:
        self.attention_scale = self.query_pre_attn_scalar**-0.5
        self.embedding_multiplier = self.dim**0.5
        super().__post_init__()


_PRE_NORM = {"model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.ffn_norm.weight"}

Gemma2Model = BaseArchonModel[Gemma2ModelArgs]
Gemma2StateDictAdapter, parallelize_gemma2, SPEC = define_family(
    "gemma2", Gemma2Model, DENSE_HF_MAP | POST_NORMS_HF_MAP | _PRE_NORM
)
