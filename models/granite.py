"""Granite 3 (IBM 2024): dense decoder with multipliers on embeddings, attention, residual sums and logits."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import ATTENTION_BIAS, HEAD_DIM, Field, dense_fields
from archon.models.spec import define_family


@dataclass
class GraniteModelArgs(BaseModelArgs):
    """Arguments of Granite 3, see `BaseModelArgs`."""

    model_types = frozenset({"granite"})
    biases_all_projections = True
    hf_fixed_values = {"mlp_bias": False}
    hf_examples = {"attention_multiplier": (0.1, 0.25)}
    hf_fields = dense_fields(HEAD_DIM, ATTENTION_BIAS, num_key_value_heads=0, max_position_embeddings=2048) | {
        "embedding_multiplier": Field("embedding_multiplier", float, 1.0),
        "attention_multiplier": Field("attention_scale", float, 1.0),
        "residual_multiplier": Field("residual_multiplier", float, 1.0),
        "logits_scaling": Field("logits_divisor", float, 1.0),
    }


GraniteModel = BaseArchonModel[GraniteModelArgs]
GraniteStateDictAdapter, parallelize_granite, SPEC = define_family("granite", GraniteModel)
