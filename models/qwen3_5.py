"""Qwen3.5 whole: the decoder of `qwen3_5_text.py`, and a tower whose rows replace the placeholders of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.args.delta_net import QWEN3_5_HF_MAP
from archon.models.base import BaseModelArgs
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.qwen3_5_text import SPEC as TEXT
from archon.models.qwen3_5_text import Qwen35TextModelArgs
from archon.models.spec import family_spec
from archon.models.vision.language_model import (
    VisionLanguageModel,
    VisionLanguageModelArgs,
    VisionLanguageStateDictAdapter,
)


@dataclass
class Qwen35ModelArgs(Qwen35TextModelArgs, VisionLanguageModelArgs):
    """See `Qwen35TextModelArgs` and `VisionLanguageModelArgs`."""

    image_token_id: int = 248056
    mrope_section: tuple[int, int, int] = (11, 11, 10)

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3_5"})


class Qwen35Model(VisionLanguageModel):
    """See `VisionLanguageModel`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen35ModelArgs


class Qwen35StateDictAdapter(VisionLanguageStateDictAdapter):
    """See `VisionLanguageStateDictAdapter`."""

    model_class = Qwen35Model
    from_hf_map = QWEN3_5_HF_MAP


parallelize_qwen3_5 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("qwen3_5", Qwen35StateDictAdapter, parallelize_qwen3_5, text=TEXT)
