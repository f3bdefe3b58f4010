"""Qwen3-VL dense (Qwen 2025, arXiv:2511.21631): Qwen3 with a vision encoder and DeepStack features."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.composite import CompositeStateDictAdapter
from archon.models.hf.config import ATTENTION_BIAS, HEAD_DIM, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.rope import MROPE_FIELDS, RopePolicy
from archon.models.spec import define_family
from archon.models.vision.language_model import (
    VisionLanguageModel,
    VisionLanguageModelArgs,
    VisionLanguageStateDictAdapter,
)

_HF_MAP = DENSE_HF_MAP | QK_NORM_HF_MAP


@dataclass
class Qwen3VLTextModelArgs(BaseModelArgs):
    """Arguments of Qwen3-VL's text decoder, see `BaseModelArgs`."""

    qk_norm: bool = True

    composite_types = {"qwen3_vl": "qwen3_vl_text"}
    biases_all_projections = True
    hf_ropes = RopePolicy(theta=500_000.0, ignored=MROPE_FIELDS)
    hf_fields = dense_fields(
        HEAD_DIM, ATTENTION_BIAS, num_key_value_heads=32, max_position_embeddings=128_000, head_dim=128
    )


@dataclass
class Qwen3VLModelArgs(Qwen3VLTextModelArgs, VisionLanguageModelArgs):
    """Arguments of Qwen3-VL, see `Qwen3VLTextModelArgs` and `VisionLanguageModelArgs`."""

    image_token_id: int = 151655
    mrope_section: tuple[int, int, int] = (24, 20, 20)

    model_types = frozenset({"qwen3_vl"})
    hf_deepstack = (8, 16, 24)


Qwen3VLTextModel = BaseArchonModel[Qwen3VLTextModelArgs]
Qwen3VLTextStateDictAdapter, _, TEXT = define_family(
    "qwen3_vl_text", Qwen3VLTextModel, _HF_MAP, adapter=CompositeStateDictAdapter
)
Qwen3VLModel = VisionLanguageModel[Qwen3VLModelArgs]
Qwen3VLStateDictAdapter, parallelize_qwen3_vl, SPEC = define_family(
    "qwen3_vl", Qwen3VLModel, _HF_MAP, adapter=VisionLanguageStateDictAdapter, text=TEXT
)
