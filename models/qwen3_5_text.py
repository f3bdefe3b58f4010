"""Qwen3.5's text decoder: gated delta nets (Yang et al. 2024, arXiv:2412.06464), every fourth layer attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from archon.models.args.delta_net import (
    QWEN3_5_FIXED_VALUES,
    QWEN3_5_HF_MAP,
    QWEN3_5_ROPES,
    DeltaNetModelArgs,
    delta_net_fields,
    mtp_fields,
)
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field
from archon.models.hf.rope import RopePolicy
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec
from archon.models.vision.language_model import CompositeStateDictAdapter


@dataclass
class Qwen35TextModelArgs(DeltaNetModelArgs):
    """See `DeltaNetModelArgs`."""

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3_5_text"})
    composite_types: ClassVar[dict[str, str]] = {"qwen3_5": "qwen3_5_text"}
    hf_ropes: ClassVar[RopePolicy] = QWEN3_5_ROPES
    hf_fields: ClassVar[dict[str, Field]] = delta_net_fields(num_key_value_heads=4) | mtp_fields()
    hf_fixed_values: ClassVar[dict[str, Any]] = QWEN3_5_FIXED_VALUES


class Qwen35TextModel(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `DeltaNetModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen35TextModelArgs


class Qwen35TextStateDictAdapter(CompositeStateDictAdapter):
    """Maps the names of dense decoders, and those of delta nets with a matrix for each projection."""

    model_class = Qwen35TextModel
    from_hf_map = QWEN3_5_HF_MAP


parallelize_qwen3_5_text = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("qwen3_5_text", Qwen35TextStateDictAdapter, parallelize_qwen3_5_text)
