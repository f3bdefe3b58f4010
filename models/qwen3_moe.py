"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with a mixture of experts in most layers."""

from dataclasses import dataclass

from archon.models.args.moe import STEPPED_EXPERT_FIELDS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import ATTENTION_BIAS, NULLABLE_HEAD_DIM, SWITCHED_WINDOW, dense_fields, with_defaults
from archon.models.hf.names import DENSE_HF_MAP, EXPERTS_HF_MAP, QK_NORM_HF_MAP
from archon.models.spec import define_family


@dataclass
class Qwen3MoEModelArgs(MoEModelArgs):
    """Arguments of Qwen3-MoE, see `MoEModelArgs`."""

    n_experts: int = 128
    n_experts_per_token: int = 8
    moe_hidden_dim: int = 768
    qk_norm: bool = True

    model_types = frozenset({"qwen3_moe"})
    biases_all_projections = True
    hf_windows = SWITCHED_WINDOW
    hf_fields = dense_fields(
        NULLABLE_HEAD_DIM, ATTENTION_BIAS, num_key_value_heads=4, max_position_embeddings=32768
    ) | with_defaults(STEPPED_EXPERT_FIELDS, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)

    def __post_init__(self) -> None:
        if self.sliding_window is not None:
            # transformers uses the window in every layer of this family and ignores max_window_layers.
            self.layer_windows = ()
        super().__post_init__()


Qwen3MoEModel = BaseArchonModel[Qwen3MoEModelArgs]
Qwen3MoEStateDictAdapter, parallelize_qwen3_moe, SPEC = define_family(
    "qwen3_moe", Qwen3MoEModel, DENSE_HF_MAP | QK_NORM_HF_MAP | EXPERTS_HF_MAP
)
