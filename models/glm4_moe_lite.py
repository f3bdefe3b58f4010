"""GLM-4.7-Flash: latent attention with wide values, and experts with DeepSeek-V3's router."""

from dataclasses import dataclass
from typing import Any, Self

from archon.models.args.latent import LATENT_FIELDS, LATENT_HF_MAP, LatentModelArgs
from archon.models.args.moe import GROUP_ROUTED_FIELDS, pop_mlp_layer_types
from archon.models.base import BaseArchonModel
from archon.models.hf.checks import check_kind, reject_field
from archon.models.hf.config import as_dict, dense_fields, with_defaults
from archon.models.hf.state_dict import MTPStateDictAdapter
from archon.models.spec import define_family


@dataclass
class Glm4MoELiteModelArgs(LatentModelArgs):
    """Arguments of GLM-4.7-Flash, see `LatentModelArgs`; `mlp_layer_types` selects the MoE layers."""

    n_dense_layers: int = 1

    model_types = frozenset({"glm4_moe_lite"})
    hf_fields = dense_fields(
        with_defaults(LATENT_FIELDS, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256),
        num_key_value_heads=20,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
    ) | with_defaults(
        GROUP_ROUTED_FIELDS,
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        first_k_dense_replace=1,
        routed_scaling_factor=1.8,
    )

    @classmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> Self:
        """See `BaseModelArgs.from_hf_config`.

        transformers ignores `first_k_dense_replace`; it must agree with `mlp_layer_types`.
        """
        config = as_dict(hf_config)
        first, kwargs = config.pop("first_k_dense_replace", None), pop_mlp_layer_types(config) | kwargs
        args = super().from_hf_config(config, is_critic, **kwargs)
        dense_layers = [layer for layer in range(args.n_layers) if not args.is_sparse(layer)]
        count = None if first is None else min(check_kind("first_k_dense_replace", first, int), args.n_layers + 1)
        if count is not None and dense_layers != [*range(count)]:
            reject_field(
                "first_k_dense_replace", first, f"it contradicts mlp_layer_types, where {dense_layers} are dense"
            )
        return args


Glm4MoELiteModel = BaseArchonModel[Glm4MoELiteModelArgs]
Glm4MoELiteStateDictAdapter, parallelize_glm4_moe_lite, SPEC = define_family(
    "glm4_moe_lite", Glm4MoELiteModel, LATENT_HF_MAP, adapter=MTPStateDictAdapter
)
