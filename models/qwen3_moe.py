"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): the shared decoder with QK norm, most layers a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.args.moe import MoEModelArgs, stepped_expert_fields
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import SWITCHED_WINDOW, Field, WindowPolicy, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, EXPERTS_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class Qwen3MoEModelArgs(MoEModelArgs):
    """See `MoEModelArgs`; `attention_bias` puts biases on all four projections."""

    n_experts: int = 128
    n_experts_per_token: int = 8
    moe_hidden_dim: int = 768
    qk_norm: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3_moe"})
    hf_windows: ClassVar[WindowPolicy] = SWITCHED_WINDOW
    hf_fields: ClassVar[dict[str, Field]] = (
        dense_fields(num_key_value_heads=4, max_position_embeddings=32768)
        | {
            "head_dim": Field("head_dim", int, 0, null=0),
            "attention_bias": Field("attention_bias", bool, False),
        }
        | stepped_expert_fields(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    )

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        if self.sliding_window is not None:
            # transformers uses the window in every layer of this family and ignores max_window_layers.
            self.layer_windows = ()
        super().__post_init__()


class Qwen3MoEModel(BaseArchonModel):
    """See `BaseArchonModel`; which layers are sparse is in `Qwen3MoEModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen3MoEModelArgs


class Qwen3MoEStateDictAdapter(BaseStateDictAdapter):
    """Qwen3's names, a router, and one set of matrices for each expert."""

    model_class = Qwen3MoEModel
    from_hf_map = DENSE_HF_MAP | QK_NORM_HF_MAP | EXPERTS_HF_MAP


parallelize_qwen3_moe = make_parallelize_fn(MOE_TP_PLAN)

SPEC = family_spec("qwen3_moe", Qwen3MoEStateDictAdapter, parallelize_qwen3_moe)
