"""Mistral (Jiang et al. 2023, arXiv:2310.06825): the shared decoder, with one sliding window in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, WindowPolicy, dense_fields, uniform_window
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class MistralModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; no projection has a bias."""

    model_types: ClassVar[frozenset[str]] = frozenset({"mistral"})
    hf_windows: ClassVar[WindowPolicy] = uniform_window(default=4096)
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(num_key_value_heads=8, max_position_embeddings=131072) | {
        "head_dim": Field("head_dim", int, 0, null=0),
    }


class MistralModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `MistralModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = MistralModelArgs


class MistralStateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders."""

    model_class = MistralModel


parallelize_mistral = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("mistral", MistralStateDictAdapter, parallelize_mistral)
