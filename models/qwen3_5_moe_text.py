"""Qwen3.5-MoE's text decoder: gated delta nets (Yang et al. 2024, arXiv:2412.06464), every fourth layer gated
attention; experts in every layer, with a gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.args.delta_net import (
    QWEN3_5_FIXED_VALUES,
    QWEN3_5_HF_MAP,
    QWEN3_5_ROPES,
    DeltaNetModelArgs,
    delta_net_fields,
    mtp_fields,
)
from archon.models.args.moe import MoEModelArgs
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field
from archon.models.hf.names import EXPERTS_HF_MAP, GATED_SHARED_EXPERT_HF_MAP
from archon.models.hf.rope import RopePolicy
from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec
from archon.models.vision.language_model import CompositeStateDictAdapter


@dataclass
class Qwen35MoeTextModelArgs(DeltaNetModelArgs, MoEModelArgs):
    """See `DeltaNetModelArgs` and `MoEModelArgs`; experts are as wide as `hidden_dim`, since no layer is dense."""

    n_experts: int = 256
    n_experts_per_token: int = 8
    shared_hidden_dim: int = 512
    norm_topk_prob: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3_5_moe_text", "qwen3_5_moe"})
    composite_types: ClassVar[dict[str, str]] = {"qwen3_5_moe": "qwen3_5_moe_text"}
    shared_gate: ClassVar[bool] = True
    hf_ropes: ClassVar[RopePolicy] = QWEN3_5_ROPES
    hf_fields: ClassVar[dict[str, Field]] = delta_net_fields(num_key_value_heads=2) | {
        "intermediate_size": Field("", int, 0, minimum=0),
        "num_experts": Field("n_experts", int, 256),
        "num_experts_per_tok": Field("n_experts_per_token", int, 8),
        "moe_intermediate_size": Field("hidden_dim", int, 512),
        "shared_expert_intermediate_size": Field("shared_hidden_dim", int, 512),
        "router_aux_loss_coef": Field("", float, 0.001),
        **mtp_fields(),
    }
    hf_fixed_values: ClassVar[dict[str, Any]] = QWEN3_5_FIXED_VALUES | {
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    # The weight of a single expert, normalized, is 1 whatever the router says: it has no gradient.
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = DeltaNetModelArgs.hf_examples | {
        "num_experts_per_tok": (2, 3, 4)
    }

    def __post_init__(self) -> None:
        self.moe_hidden_dim = self.hidden_dim
        super().__post_init__()


class Qwen35MoeTextModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Qwen35MoeTextModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen35MoeTextModelArgs


class Qwen35MoeTextStateDictAdapter(CompositeStateDictAdapter):
    """Maps the names of dense decoders, of delta nets with a matrix for each projection, and of experts.

    transformers writes a matrix for each expert; published checkpoints stack them, see `for_keys`.
    """

    model_class = Qwen35MoeTextModel
    from_hf_map = QWEN3_5_HF_MAP | EXPERTS_HF_MAP | GATED_SHARED_EXPERT_HF_MAP


parallelize_qwen3_5_moe_text = make_parallelize_fn(MOE_TP_PLAN)

SPEC = family_spec("qwen3_5_moe_text", Qwen35MoeTextStateDictAdapter, parallelize_qwen3_5_moe_text)
