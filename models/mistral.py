"""Mistral (Jiang et al. 2023, arXiv:2310.06825): dense decoder with one sliding window in every layer."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import NULLABLE_HEAD_DIM, dense_fields, uniform_window
from archon.models.spec import define_family


@dataclass
class MistralModelArgs(BaseModelArgs):
    """Arguments of Mistral, see `BaseModelArgs`."""

    model_types = frozenset({"mistral"})
    hf_windows = uniform_window(default=4096)
    hf_fields = dense_fields(NULLABLE_HEAD_DIM, num_key_value_heads=8, max_position_embeddings=131072)


MistralModel = BaseArchonModel[MistralModelArgs]
MistralStateDictAdapter, parallelize_mistral, SPEC = define_family("mistral", MistralModel)
