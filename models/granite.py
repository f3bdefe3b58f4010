"""Granite 3 (IBM 2024): the shared decoder with factors on embeddings, attention, what layers add, and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import NO_WINDOWS, Field, WindowPolicy, dense_fields
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class GraniteModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; `attention_bias` puts biases on all four projections."""

    model_types: ClassVar[frozenset[str]] = frozenset({"granite"})
    hf_windows: ClassVar[WindowPolicy] = NO_WINDOWS
    hf_fixed_values: ClassVar[dict[str, Any]] = {"mlp_bias": False}
    hf_examples: ClassVar[dict[str, tuple[Any, ...]]] = {"attention_multiplier": (0.1, 0.25)}
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(num_key_value_heads=0, max_position_embeddings=2048) | {
        # transformers' Granite uses `head_dim`, which its config class does not declare.
        "head_dim": Field("head_dim", int, 0),
        "attention_bias": Field("attention_bias", bool, False),
        "embedding_multiplier": Field("embedding_multiplier", float, 1.0),
        "attention_multiplier": Field("attention_scale", float, 1.0),
        "residual_multiplier": Field("residual_multiplier", float, 1.0),
        "logits_scaling": Field("logits_divisor", float, 1.0),
    }

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        super().__post_init__()


class GraniteModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `GraniteModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = GraniteModelArgs


class GraniteStateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders."""

    model_class = GraniteModel


parallelize_granite = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("granite", GraniteStateDictAdapter, parallelize_granite)
