"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388): dense decoder with norms of each head's queries and keys."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import ATTENTION_BIAS, HEAD_DIM, SWITCHED_WINDOW, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.spec import define_family


@dataclass
class Qwen3ModelArgs(BaseModelArgs):
    """Arguments of Qwen3, see `BaseModelArgs`."""

    qk_norm: bool = True

    model_types = frozenset({"qwen3"})
    biases_all_projections = True
    hf_windows = SWITCHED_WINDOW
    hf_fields = dense_fields(
        HEAD_DIM, ATTENTION_BIAS, num_key_value_heads=32, max_position_embeddings=32768, head_dim=128
    )


Qwen3Model = BaseArchonModel[Qwen3ModelArgs]
Qwen3StateDictAdapter, parallelize_qwen3, SPEC = define_family("qwen3", Qwen3Model, DENSE_HF_MAP | QK_NORM_HF_MAP)
