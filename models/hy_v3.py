"""Hunyuan 3 (Tencent 2026): GQA with QK norms, and DeepSeek-V3's router without groups."""

from dataclasses import dataclass
from typing import Any

from archon.models.args.moe import GroupRoutedArgs, pop_mlp_layer_types
from archon.models.base import BaseArchonModel
from archon.models.hf.config import ATTENTION_BIAS, MAX_LAYERS, Field, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, GROUP_ROUTED_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import MTPStateDictAdapter
from archon.models.spec import define_family

_FIELDS = dense_fields(
    ATTENTION_BIAS, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, initializer_range=0.006
)


@dataclass
class HYV3ModelArgs(GroupRoutedArgs):
    """Arguments of Hunyuan 3, see `GroupRoutedArgs`; `mlp_layer_types` selects the MoE layers."""

    qk_norm: bool = True
    n_dense_layers: int = 1

    model_types = frozenset({"hy_v3"})
    biases_all_projections = True
    hf_ropes = RopePolicy(theta=11_158_840.0)
    hf_aliases = {"num_local_experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"}
    # Fields of the published configs that transformers ignores.
    hf_fixed_values = {
        "first_k_dense_replace": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "qk_norm": True,
        "route_norm": True,
    }
    hf_fields = _FIELDS | {
        "head_dim": Field("head_dim", int, 128),
        "num_experts": Field("n_experts", int, 192),
        "num_experts_per_tok": Field("n_experts_per_token", int, 8),
        "num_shared_experts": Field("n_shared_experts", int, 1),
        "moe_intermediate_size": Field("moe_hidden_dim", int, 1536),
        "router_scaling_factor": Field("routed_scaling_factor", float, 2.826),
        "num_nextn_predict_layers": Field("", int, 1, minimum=0, maximum=MAX_LAYERS),
        # archon computes softmax and logits in float32, and a sum of two numbers is rounded once in any dtype.
        "enable_attention_fp32_softmax": Field("", bool, True),
        "enable_lm_head_fp32": Field("", bool, True),
        "enable_moe_fp32_combine": Field("", bool, True),
        "use_grouped_mm": Field("", bool, True),
        "eod_token_id": Field("", int, None, null=None, minimum=0),
    }
    # The normalized weight of a single expert is constant, which leaves the router without a gradient.
    hf_examples = {"num_experts_per_tok": (2, 3, 4), "num_shared_experts": (1, 2)}

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `BaseModelArgs.decoder_config`; reads `mlp_layer_types`."""
        config, extra = super().decoder_config(config)
        config = dict(config)
        return config, pop_mlp_layer_types(config) | extra


_EXPERTS = {
    "model.layers.{}.mlp.router.gate.weight": "layers.{}.moe.router.gate.weight",
    "model.layers.{}.mlp.expert_bias": "layers.{}.moe.router.expert_bias",
    **{
        f"model.layers.{{}}.mlp.shared_mlp.{hf}_proj.weight": f"layers.{{}}.moe.shared_experts.{native}.weight"
        for hf, native in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
}

HYV3Model = BaseArchonModel[HYV3ModelArgs]
HYV3StateDictAdapter, parallelize_hy_v3, SPEC = define_family(
    "hy_v3",
    HYV3Model,
    DENSE_HF_MAP | QK_NORM_HF_MAP | GROUP_ROUTED_HF_MAP | _EXPERTS,
    adapter=MTPStateDictAdapter,
)
HYV3StateDictAdapter.mtp_names = None  # a norm of its MTP layers has another name
