"""MiniMax-M2 (MiniMax 2025): experts in every layer, a sigmoid router with bias, and full-width QK norms."""

from dataclasses import dataclass, replace
from typing import Any, Self

from archon.models.args.moe import LOCAL_EXPERT_FIELDS, SEVERAL_EXPERTS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import Field, as_dict, dense_fields, reject_field, with_defaults
from archon.models.hf.names import BLOCK_SPARSE_HF_MAP, DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.layers.moe import ExpertsLayer
from archon.models.spec import define_family


@dataclass
class MiniMaxM2ModelArgs(MoEModelArgs):
    """Arguments of MiniMax-M2, see `MoEModelArgs`."""

    n_experts: int = 256
    n_experts_per_token: int = 8
    norm_topk_prob: bool = True
    qk_norm: bool = True
    full_width_qk_norm: bool = True

    model_types = frozenset({"minimax_m2"})
    has_no_dense_layers = True
    hf_ropes = RopePolicy(theta=5_000_000.0, partial=1.0, rotary_dim_field="rotary_dim")
    hf_aliases = {"num_experts": "num_local_experts"}
    # Fields of the published configs that transformers ignores.
    hf_fixed_values = {
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "sliding_window": None,
    }
    hf_fields = dense_fields(num_key_value_heads=8, max_position_embeddings=196608) | {
        "head_dim": Field("head_dim", int, 128),
        **with_defaults(LOCAL_EXPERT_FIELDS, num_local_experts=256, num_experts_per_tok=8),
        "auto_map": Field("", dict, None, null=None),
        "mlp_intermediate_size": Field("", int, 0, minimum=0),
        "shared_moe_mode": Field("", str, ""),
        "use_mtp": Field("", bool, False),
        "num_mtp_modules": Field("", int, 0, minimum=0),
        "mtp_transformer_layers": Field("", int, 0, minimum=0),
    }
    hf_examples = SEVERAL_EXPERTS

    def experts(self) -> ExpertsLayer:
        """See `MoEModelArgs.experts`."""
        return replace(super().experts(), score="sigmoid", correction_bias=True)

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Self:
        """See `BaseModelArgs.from_hf_config`; `attn_type_list` must be 1 (softmax attention) in every layer."""
        config = as_dict(hf_config)
        kinds = config.pop("attn_type_list", None)
        if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
            reject_field("attn_type_list", kinds, "expected 1 for every layer")
        return super().from_hf_config(config, is_critic, **kwargs)


_ROUTER_BIAS = {"model.layers.{}.block_sparse_moe.e_score_correction_bias": "layers.{}.moe.router.expert_bias"}

MiniMaxM2Model = BaseArchonModel[MiniMaxM2ModelArgs]
MiniMaxM2StateDictAdapter, parallelize_minimax_m2, SPEC = define_family(
    "minimax_m2", MiniMaxM2Model, DENSE_HF_MAP | QK_NORM_HF_MAP | BLOCK_SPARSE_HF_MAP | _ROUTER_BIAS
)
