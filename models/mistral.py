"""Mistral (Jiang et al. 2023, arXiv:2310.06825): dense decoder with one sliding window in every layer."""

from dataclasses import dataclass

from archon.models.args.base import BaseModelArgs
from archon.models.hf.config import Field, dense_fields, uniform_window
from archon.models.spec import define_family


@dataclass
class MistralModelArgs(BaseModelArgs):
    """Arguments of Mistral, see `BaseModelArgs`."""

    model_types = frozenset({"mistral"})
    hf_windows = uniform_window(default=4096)
    hf_fields = dense_fields(num_key_value_heads=8, max_position_embeddings=131072) | {
        "head_dim": Field("head_dim", int, 0, null=0),
    }


MistralModel, MistralStateDictAdapter, parallelize_mistral, SPEC = define_family("mistral", MistralModelArgs)
