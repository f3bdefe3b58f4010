"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): dense decoder with biases on wq, wk and wv."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import NULLABLE_HEAD_DIM, SWITCHED_WINDOW, dense_fields
from archon.models.spec import define_family


@dataclass
class Qwen2ModelArgs(BaseModelArgs):
    """Arguments of Qwen2, see `BaseModelArgs`."""

    attention_bias: bool = True

    model_types = frozenset({"qwen2"})
    hf_windows = SWITCHED_WINDOW
    hf_fields = dense_fields(NULLABLE_HEAD_DIM, num_key_value_heads=32, max_position_embeddings=32768)


Qwen2Model = BaseArchonModel[Qwen2ModelArgs]
Qwen2StateDictAdapter, parallelize_qwen2, SPEC = define_family("qwen2", Qwen2Model)
