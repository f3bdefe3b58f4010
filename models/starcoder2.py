"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms, and a feed-forward network without a gate."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import HEAD_DIM, Field, dense_fields, uniform_window
from archon.models.hf.names import DENSE_HF_MAP, HFMap
from archon.models.spec import define_family

_FIELDS = dense_fields(
    HEAD_DIM,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    initializer_range=0.018042,
)


@dataclass
class Starcoder2ModelArgs(BaseModelArgs):
    """Arguments of StarCoder2, see `BaseModelArgs`; `attention_bias` also sets the feed-forward network's biases."""

    norm_centered: bool = True
    norm_bias: bool = True
    mlp_ungated: bool = True

    model_types = frozenset({"starcoder2"})
    biases_all_projections = True
    hf_windows = uniform_window(default=None)
    # Fields of the published configs that transformers ignores.
    hf_fixed_values = {
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-5,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "mlp_type": "default",
        "norm_type": "layer_norm",
    }
    hf_fields = {name: field for name, field in _FIELDS.items() if name != "rms_norm_eps"} | {
        "norm_epsilon": Field("norm_eps", float, 1e-5),
        "use_bias": Field("attention_bias", bool, True),
    }

    def __post_init__(self) -> None:
        self.mlp_bias = self.attention_bias
        super().__post_init__()


_PARTS = ("weight", "bias")
_LAYER_NORMS_AND_NETWORK: HFMap = {
    **{f"model.layers.{{}}.mlp.c_fc.{part}": f"layers.{{}}.feed_forward.w3.{part}" for part in _PARTS},
    **{f"model.layers.{{}}.mlp.c_proj.{part}": f"layers.{{}}.feed_forward.w2.{part}" for part in _PARTS},
    "model.layers.{}.input_layernorm.bias": "layers.{}.attention_norm.bias",
    "model.layers.{}.post_attention_layernorm.bias": "layers.{}.ffn_norm.bias",
    "model.norm.bias": "norm.bias",
}

Starcoder2Model = BaseArchonModel[Starcoder2ModelArgs]
Starcoder2StateDictAdapter, parallelize_starcoder2, SPEC = define_family(
    "starcoder2", Starcoder2Model, {**DENSE_HF_MAP, **_LAYER_NORMS_AND_NETWORK}
)
