"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in every layer, and full-width QK norms."""

from dataclasses import dataclass

from archon.models.args.moe import MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import ATTENTION_BIAS, Field, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, EXPERTS_HF_MAP, QK_NORM_HF_MAP
from archon.models.spec import define_family


@dataclass
class OlmoeModelArgs(MoEModelArgs):
    """Arguments of OLMoE, see `MoEModelArgs`."""

    n_experts: int = 64
    n_experts_per_token: int = 8
    qk_norm: bool = True
    full_width_qk_norm: bool = True

    model_types = frozenset({"olmoe"})
    biases_all_projections = True
    has_no_dense_layers = True
    hf_fixed_values = {"clip_qkv": None}
    hf_fields = dense_fields(
        ATTENTION_BIAS, num_key_value_heads=0, max_position_embeddings=4096, rms_norm_eps=1e-5, pad_token_id=1
    ) | {
        "num_experts": Field("n_experts", int, 64),
        "num_experts_per_tok": Field("n_experts_per_token", int, 8),
        "norm_topk_prob": Field("norm_topk_prob", bool, False),
        "router_aux_loss_coef": Field("", float, 0.01),
    }


OlmoeModel = BaseArchonModel[OlmoeModelArgs]
OlmoeStateDictAdapter, parallelize_olmoe, SPEC = define_family(
    "olmoe", OlmoeModel, DENSE_HF_MAP | QK_NORM_HF_MAP | EXPERTS_HF_MAP
)
