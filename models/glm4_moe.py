"""GLM-4.5 (GLM-4.5 Team 2025, arXiv:2508.06471): DeepSeek-V3's experts, GQA with partial RoPE."""

from dataclasses import dataclass

from archon.models.args.moe import GROUP_ROUTED_FIELDS, GroupRoutedArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import ATTENTION_BIAS, HEAD_DIM, MAX_LAYERS, Field, dense_fields, with_defaults
from archon.models.hf.names import DENSE_HF_MAP, GROUP_ROUTED_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import MTPStateDictAdapter
from archon.models.spec import define_family


@dataclass
class Glm4MoEModelArgs(GroupRoutedArgs):
    """Arguments of GLM-4.5, see `GroupRoutedArgs`."""

    model_types = frozenset({"glm4_moe"})
    hf_ropes = RopePolicy(partial=0.5)
    hf_aliases = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
    # RoPE rotates half of the features, which must be an even number.
    hf_examples = {"head_dim": (8, 12, 16)}
    hf_fields = (
        dense_fields(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
        | with_defaults(
            GROUP_ROUTED_FIELDS,
            n_routed_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
        )
        | HEAD_DIM
        | ATTENTION_BIAS
        | {
            "use_qk_norm": Field("qk_norm", bool, False),
            "num_nextn_predict_layers": Field("", int, 1, minimum=0, maximum=MAX_LAYERS),
        }
    )


Glm4MoEModel = BaseArchonModel[Glm4MoEModelArgs]
Glm4MoEStateDictAdapter, parallelize_glm4_moe, SPEC = define_family(
    "glm4_moe", Glm4MoEModel, DENSE_HF_MAP | QK_NORM_HF_MAP | GROUP_ROUTED_HF_MAP, adapter=MTPStateDictAdapter
)
