"""Llama 1 to 3.x (Touvron et al. 2023, arXiv:2302.13971; Llama team 2024, arXiv:2407.21783): the shared decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import NO_WINDOWS, Field, WindowPolicy, dense_fields
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class LlamaModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; `attention_bias` puts biases on all four projections."""

    model_types: ClassVar[frozenset[str]] = frozenset({"llama"})
    hf_windows: ClassVar[WindowPolicy] = NO_WINDOWS
    hf_fixed_values: ClassVar[dict[str, Any]] = {"mlp_bias": False, "pretraining_tp": 1}
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(num_key_value_heads=0, max_position_embeddings=2048) | {
        "head_dim": Field("head_dim", int, 0, null=0),
        "attention_bias": Field("attention_bias", bool, False),
    }

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        super().__post_init__()


class LlamaModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `LlamaModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = LlamaModelArgs


class LlamaStateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders."""

    model_class = LlamaModel


parallelize_llama = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("llama", LlamaStateDictAdapter, parallelize_llama)
