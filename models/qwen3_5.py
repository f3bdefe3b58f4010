"""Qwen3.5 whole: the decoder of `qwen3_5_text.py` with a vision encoder."""

from dataclasses import dataclass

from archon.models.args.delta_net import QWEN3_5_HF_MAP
from archon.models.qwen3_5_text import SPEC as TEXT
from archon.models.qwen3_5_text import Qwen35TextModelArgs
from archon.models.spec import define_family
from archon.models.vision.language_model import (
    VisionLanguageModel,
    VisionLanguageModelArgs,
    VisionLanguageStateDictAdapter,
)


@dataclass
class Qwen35ModelArgs(Qwen35TextModelArgs, VisionLanguageModelArgs):
    """Arguments of Qwen3.5, see `Qwen35TextModelArgs` and `VisionLanguageModelArgs`."""

    image_token_id: int = 248056
    mrope_section: tuple[int, int, int] = (11, 11, 10)

    model_types = frozenset({"qwen3_5"})


Qwen35Model = VisionLanguageModel[Qwen35ModelArgs]
Qwen35StateDictAdapter, parallelize_qwen3_5, SPEC = define_family(
    "qwen3_5", Qwen35Model, QWEN3_5_HF_MAP, adapter=VisionLanguageStateDictAdapter, text=TEXT
)
