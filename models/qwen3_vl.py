"""Qwen3-VL dense (Qwen 2025, arXiv:2511.21631): Qwen3's decoder, whose first layers see further blocks of the tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import NO_WINDOWS, Field, WindowPolicy, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import MROPE_FIELDS, RopePolicy
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec
from archon.models.vision.language_model import (
    CompositeStateDictAdapter,
    VisionLanguageModel,
    VisionLanguageModelArgs,
    VisionLanguageStateDictAdapter,
)


@dataclass
class Qwen3VLTextModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; `attention_bias` puts biases on all four projections."""

    qk_norm: bool = True

    composite_types: ClassVar[dict[str, str]] = {"qwen3_vl": "qwen3_vl_text"}
    hf_windows: ClassVar[WindowPolicy] = NO_WINDOWS
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(theta=500_000.0, ignored=MROPE_FIELDS)
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(num_key_value_heads=32, max_position_embeddings=128_000) | {
        "head_dim": Field("head_dim", int, 128),
        "attention_bias": Field("attention_bias", bool, False),
    }

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        super().__post_init__()


@dataclass
class Qwen3VLModelArgs(Qwen3VLTextModelArgs, VisionLanguageModelArgs):
    """See `Qwen3VLTextModelArgs` and `VisionLanguageModelArgs`."""

    image_token_id: int = 151655
    mrope_section: tuple[int, int, int] = (24, 20, 20)

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3_vl"})
    hf_deepstack: ClassVar[tuple[int, ...] | None] = (8, 16, 24)


class Qwen3VLTextModel(BaseArchonModel):
    """See `BaseArchonModel`: the decoder alone."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen3VLTextModelArgs


class Qwen3VLModel(VisionLanguageModel):
    """See `VisionLanguageModel`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen3VLModelArgs


class Qwen3VLTextStateDictAdapter(CompositeStateDictAdapter):
    """Maps the names of Qwen3; the tower is carried."""

    model_class, from_hf_map = Qwen3VLTextModel, DENSE_HF_MAP | QK_NORM_HF_MAP


class Qwen3VLStateDictAdapter(VisionLanguageStateDictAdapter):
    """See `VisionLanguageStateDictAdapter`."""

    model_class, from_hf_map = Qwen3VLModel, DENSE_HF_MAP | QK_NORM_HF_MAP


parallelize_qwen3_vl = make_parallelize_fn(DENSE_TP_PLAN)

TEXT = family_spec("qwen3_vl_text", Qwen3VLTextStateDictAdapter, parallelize_qwen3_vl)
SPEC = family_spec("qwen3_vl", Qwen3VLStateDictAdapter, parallelize_qwen3_vl, text=TEXT)
