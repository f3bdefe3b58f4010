"""Llama 1 to 3.x (Touvron et al. 2023, arXiv:2302.13971; Llama team 2024, arXiv:2407.21783): dense decoder."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import ATTENTION_BIAS, MLP_BIAS, NULLABLE_HEAD_DIM, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, MLP_BIAS_HF_MAP
from archon.models.spec import define_family


@dataclass
class LlamaModelArgs(BaseModelArgs):
    """Arguments of Llama, see `BaseModelArgs`."""

    model_types = frozenset({"llama"})
    biases_all_projections = True
    hf_fixed_values = {"pretraining_tp": 1}
    hf_fields = dense_fields(
        NULLABLE_HEAD_DIM, ATTENTION_BIAS, MLP_BIAS, num_key_value_heads=0, max_position_embeddings=2048
    )


LlamaModel = BaseArchonModel[LlamaModelArgs]
LlamaStateDictAdapter, parallelize_llama, SPEC = define_family("llama", LlamaModel, DENSE_HF_MAP | MLP_BIAS_HF_MAP)
