"""GLM-4.5 (GLM-4.5 Team 2025, arXiv:2508.06471): DeepSeek-V3's experts behind grouped-query attention with
partly rotated heads; the first layers are dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.args.moe import GroupRoutedArgs, group_routed_fields
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import MAX_LAYERS, NO_WINDOWS, Field, WindowPolicy, dense_fields
from archon.models.hf.mtp import MTPStateDictAdapter
from archon.models.hf.names import DENSE_HF_MAP, GROUP_ROUTED_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class Glm4MoEModelArgs(GroupRoutedArgs):
    """See `GroupRoutedArgs`; the output projection never has a bias."""

    model_types: ClassVar[frozenset[str]] = frozenset({"glm4_moe"})
    hf_windows: ClassVar[WindowPolicy] = NO_WINDOWS
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(partial=0.5)
    hf_aliases: ClassVar[dict[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    # Half of their features is an even number.
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = {"head_dim": (8, 12, 16)}
    hf_fields: ClassVar[dict[str, Field]] = (
        dense_fields(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
        | group_routed_fields(
            n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, first_k_dense_replace=1
        )
        | {
            "head_dim": Field("head_dim", int, 0),
            "attention_bias": Field("attention_bias", bool, False),
            "use_qk_norm": Field("qk_norm", bool, False),
            "num_nextn_predict_layers": Field("", int, 1, minimum=0, maximum=MAX_LAYERS),
        }
    )


class Glm4MoEModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Glm4MoEModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Glm4MoEModelArgs


class Glm4MoEStateDictAdapter(MTPStateDictAdapter):
    """The common names of dense decoders, norms of queries and keys, and those of DeepSeek-V3's experts.

    Layers after the last one predict further tokens; they are carried.
    """

    model_class = Glm4MoEModel
    from_hf_map = DENSE_HF_MAP | QK_NORM_HF_MAP | GROUP_ROUTED_HF_MAP


parallelize_glm4_moe = make_parallelize_fn(MOE_TP_PLAN)

SPEC = family_spec("glm4_moe", Glm4MoEStateDictAdapter, parallelize_glm4_moe)
