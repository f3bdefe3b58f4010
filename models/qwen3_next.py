"""Qwen3-Next: gated delta nets (Yang et al. 2024, arXiv:2412.06464), every fourth layer gated attention; experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.args.delta_net import (
    DELTA_NET_BLOCKS_HF_MAP,
    DELTA_NET_HF_MAP,
    DeltaNetModelArgs,
    delta_net_fields,
)
from archon.models.args.moe import MoEModelArgs, stepped_expert_fields
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field
from archon.models.hf.names import EXPERTS_HF_MAP, GATED_SHARED_EXPERT_HF_MAP
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class Qwen3NextModelArgs(DeltaNetModelArgs, MoEModelArgs):
    """See `DeltaNetModelArgs` and `MoEModelArgs`; the shared expert has a gate."""

    n_experts: int = 512
    n_experts_per_token: int = 10
    moe_hidden_dim: int = 512
    shared_hidden_dim: int = 512
    norm_topk_prob: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3_next"})
    shared_gate: ClassVar[bool] = True
    hf_fields: ClassVar[dict[str, Field]] = (
        delta_net_fields(num_key_value_heads=2)
        | {
            "shared_expert_intermediate_size": Field("shared_hidden_dim", int, 512),
        }
        | stepped_expert_fields(num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, norm_topk_prob=True)
    )
    hf_fixed_values: ClassVar[dict[str, Any]] = {"attn_output_gate": True}


class Qwen3NextModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Qwen3NextModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen3NextModelArgs


class Qwen3NextStateDictAdapter(BaseStateDictAdapter):
    """Maps delta nets in blocks of key heads, and experts; carries the layers that predict further tokens."""

    model_class = Qwen3NextModel
    from_hf_map = DELTA_NET_HF_MAP | DELTA_NET_BLOCKS_HF_MAP | EXPERTS_HF_MAP | GATED_SHARED_EXPERT_HF_MAP
    passthrough = ("mtp.*",)


parallelize_qwen3_next = make_parallelize_fn(MOE_TP_PLAN)

SPEC = family_spec("qwen3_next", Qwen3NextStateDictAdapter, parallelize_qwen3_next)
