"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): the shared decoder with biases on queries, keys and
values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import SWITCHED_WINDOW, Field, WindowPolicy, dense_fields
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class Qwen2ModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; the output projection never has a bias."""

    attention_bias: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen2"})
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(num_key_value_heads=32, max_position_embeddings=32768) | {
        # transformers' Qwen2 uses `head_dim`, which its config class does not declare.
        "head_dim": Field("head_dim", int, 0, null=0),
    }
    hf_windows: ClassVar[WindowPolicy] = SWITCHED_WINDOW


class Qwen2Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Qwen2ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen2ModelArgs


class Qwen2StateDictAdapter(BaseStateDictAdapter):
    """The common names of dense decoders."""

    model_class = Qwen2Model


parallelize_qwen2 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("qwen2", Qwen2StateDictAdapter, parallelize_qwen2)
