"""Qwen3.5-MoE's text decoder: Qwen3.5's with experts and a gated shared expert in every layer."""

from dataclasses import dataclass

from archon.models.args.delta_net import DELTA_NET_FIELDS, MTP_FIELDS, QWEN3_5_HF_MAP
from archon.models.args.moe import SEVERAL_EXPERTS, MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.composite import CompositeStateDictAdapter
from archon.models.hf.config import Field, dense_fields
from archon.models.hf.mtp import QWEN_MTP
from archon.models.hf.names import EXPERTS_HF_MAP, GATED_SHARED_EXPERT_HF_MAP
from archon.models.qwen3_5_text import Qwen35TextModelArgs
from archon.models.spec import define_family


@dataclass
class Qwen35MoeTextModelArgs(Qwen35TextModelArgs, MoEModelArgs):
    """Arguments of Qwen3.5-MoE's decoder, see `Qwen35TextModelArgs` and `MoEModelArgs`."""

    n_experts: int = 256
    n_experts_per_token: int = 8
    shared_hidden_dim: int = 512
    norm_topk_prob: bool = True

    model_types = frozenset({"qwen3_5_moe_text", "qwen3_5_moe"})
    has_no_dense_layers = True
    composite_types = {"qwen3_5_moe": "qwen3_5_moe_text"}
    shared_gate = True
    hf_fields = dense_fields(DELTA_NET_FIELDS, num_key_value_heads=2, max_position_embeddings=32768) | {
        "intermediate_size": Field("", int, 0, minimum=0),
        "num_experts": Field("n_experts", int, 256),
        "num_experts_per_tok": Field("n_experts_per_token", int, 8),
        "moe_intermediate_size": Field("hidden_dim", int, 512),
        "shared_expert_intermediate_size": Field("shared_hidden_dim", int, 512),
        "router_aux_loss_coef": Field("", float, 0.001),
        **MTP_FIELDS,
    }
    hf_fixed_values = Qwen35TextModelArgs.hf_fixed_values | {"norm_topk_prob": True, "decoder_sparse_step": 1}
    hf_examples = Qwen35TextModelArgs.hf_examples | SEVERAL_EXPERTS


# transformers writes one matrix per expert; published checkpoints stack them, see `BaseStateDictAdapter.for_keys`.
Qwen35MoeTextModel = BaseArchonModel[Qwen35MoeTextModelArgs]
Qwen35MoeTextStateDictAdapter, parallelize_qwen3_5_moe_text, SPEC = define_family(
    "qwen3_5_moe_text",
    Qwen35MoeTextModel,
    QWEN3_5_HF_MAP | EXPERTS_HF_MAP | GATED_SHARED_EXPERT_HF_MAP,
    adapter=CompositeStateDictAdapter,
)
Qwen35MoeTextStateDictAdapter.mtp_names = QWEN_MTP
