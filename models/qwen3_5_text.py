"""Qwen3.5's text decoder: gated delta nets (arXiv:2412.06464), gated attention in every fourth layer."""

from dataclasses import dataclass

from archon.models.args.delta_net import DELTA_NET_FIELDS, MTP_FIELDS, QWEN3_5_HF_MAP, DeltaNetModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.composite import CompositeStateDictAdapter
from archon.models.hf.config import dense_fields
from archon.models.hf.mtp import QWEN_MTP
from archon.models.hf.rope import MROPE_FIELDS, RopePolicy
from archon.models.spec import define_family


@dataclass
class Qwen35TextModelArgs(DeltaNetModelArgs):
    """Arguments of Qwen3.5's decoder, see `DeltaNetModelArgs`."""

    model_types = frozenset({"qwen3_5_text"})
    composite_types = {"qwen3_5": "qwen3_5_text"}
    hf_ropes = RopePolicy(partial=0.25, ignored=MROPE_FIELDS)
    hf_fields = dense_fields(DELTA_NET_FIELDS, MTP_FIELDS, num_key_value_heads=4, max_position_embeddings=32768)
    # Fields of published configs that transformers ignores.
    hf_fixed_values = {
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
    }


Qwen35TextModel = BaseArchonModel[Qwen35TextModelArgs]
Qwen35TextStateDictAdapter, parallelize_qwen3_5_text, SPEC = define_family(
    "qwen3_5_text", Qwen35TextModel, QWEN3_5_HF_MAP, adapter=CompositeStateDictAdapter
)
Qwen35TextStateDictAdapter.mtp_names = QWEN_MTP
