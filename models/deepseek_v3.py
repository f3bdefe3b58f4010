"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention and group-limited experts."""

from dataclasses import dataclass

from archon.models.args.latent import LATENT_FIELDS, LATENT_HF_MAP, LatentModelArgs
from archon.models.args.moe import GROUP_ROUTED_FIELDS
from archon.models.base import BaseArchonModel
from archon.models.hf.config import dense_fields, with_defaults
from archon.models.hf.state_dict import MTPStateDictAdapter
from archon.models.spec import define_family


@dataclass
class DeepseekV3ModelArgs(LatentModelArgs):
    """Arguments of DeepSeek-V3, see `LatentModelArgs`."""

    model_types = frozenset({"deepseek_v3"})
    hf_fields = dense_fields(LATENT_FIELDS, num_key_value_heads=128, max_position_embeddings=4096) | with_defaults(
        GROUP_ROUTED_FIELDS,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    )


DeepseekV3Model = BaseArchonModel[DeepseekV3ModelArgs]
DeepseekV3StateDictAdapter, parallelize_deepseek_v3, SPEC = define_family(
    "deepseek_v3", DeepseekV3Model, LATENT_HF_MAP, adapter=MTPStateDictAdapter
)
