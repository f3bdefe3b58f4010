"""Qwen3-Next: gated delta nets (arXiv:2412.06464), gated attention in every fourth layer, and experts."""

from dataclasses import dataclass

from archon.models.args.delta_net import DELTA_NET_BLOCKS_HF_MAP, DELTA_NET_FIELDS, DELTA_NET_HF_MAP, DeltaNetModelArgs
from archon.models.args.moe import STEPPED_EXPERT_FIELDS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.config import Field, dense_fields, with_defaults
from archon.models.hf.mtp import QWEN_MTP
from archon.models.hf.names import EXPERTS_HF_MAP, GATED_SHARED_EXPERT_HF_MAP
from archon.models.spec import define_family


@dataclass
class Qwen3NextModelArgs(DeltaNetModelArgs, MoEModelArgs):
    """Arguments of Qwen3-Next, see `DeltaNetModelArgs` and `MoEModelArgs`."""

    n_experts: int = 512
    n_experts_per_token: int = 10
    moe_hidden_dim: int = 512
    shared_hidden_dim: int = 512
    norm_topk_prob: bool = True

    model_types = frozenset({"qwen3_next"})
    shared_gate = True
    hf_fields = {
        **dense_fields(DELTA_NET_FIELDS, num_key_value_heads=2, max_position_embeddings=32768),
        "shared_expert_intermediate_size": Field("shared_hidden_dim", int, 512),
        **with_defaults(STEPPED_EXPERT_FIELDS, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512),
        "norm_topk_prob": Field("norm_topk_prob", bool, True),
    }
    hf_fixed_values = {"attn_output_gate": True}


Qwen3NextModel = BaseArchonModel[Qwen3NextModelArgs]
Qwen3NextStateDictAdapter, parallelize_qwen3_next, SPEC = define_family(
    "qwen3_next",
    Qwen3NextModel,
    DELTA_NET_HF_MAP | DELTA_NET_BLOCKS_HF_MAP | EXPERTS_HF_MAP | GATED_SHARED_EXPERT_HF_MAP,
    passthrough=("mtp.*",),
)
Qwen3NextStateDictAdapter.mtp_names = QWEN_MTP
