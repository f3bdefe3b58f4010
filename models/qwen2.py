"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): the shared decoder with biases on queries, keys and
values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf_config import DENSE_FIELDS, Field
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec
from archon.models.state_dict import BaseStateDictAdapter


@dataclass
class Qwen2ModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; the output projection never has a bias."""

    attention_bias: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen2"})
    # transformers' Qwen2 uses `head_dim`, which its config class does not declare.
    hf_fields: ClassVar[dict[str, Field]] = DENSE_FIELDS | {"head_dim": Field("head_dim", int, 0, optional=True)}


class Qwen2Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Qwen2ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen2ModelArgs


class Qwen2StateDictAdapter(BaseStateDictAdapter):
    """The common names of dense decoders."""

    model_class = Qwen2Model


parallelize_qwen2 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("qwen2", Qwen2StateDictAdapter, parallelize_qwen2)
