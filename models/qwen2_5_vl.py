"""Qwen2.5-VL (Qwen 2025, arXiv:2502.13923): Qwen2.5 with a vision encoder that attends within windows."""

from dataclasses import dataclass
from typing import Any

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.composite import DECODER, CompositeStateDictAdapter
from archon.models.hf.config import SWITCHED_WINDOW, CompositePolicy, WindowPolicy, dense_fields
from archon.models.hf.rope import MROPE_FIELDS, RopePolicy
from archon.models.hf.state_dict import WITHOUT_HEAD
from archon.models.spec import define_family
from archon.models.vision.encoder import VisionSpec
from archon.models.vision.language_model import (
    VisionLanguageModel,
    VisionLanguageModelArgs,
    VisionLanguageStateDictAdapter,
)
from archon.models.vision.windowed import WINDOWED_HF_MAP, read_windowed_vision

# Files have the first names, also those that transformers 5 writes; versions 4.52 to 4.57 have the second in memory.
_NAMES: tuple[dict[str, str], ...] = ({DECODER: "model.", "model.visual.": "visual."}, {}, WITHOUT_HEAD)


@dataclass
class Qwen25VLTextModelArgs(BaseModelArgs):
    """Arguments of Qwen2.5-VL's text decoder, see `BaseModelArgs`."""

    attention_bias: bool = True

    composite_types = {"qwen2_5_vl": "qwen2_5_vl_text"}
    hf_composite = CompositePolicy((*CompositePolicy().ignored, "vision_token_id"), may_be_flat=True)
    hf_ropes = RopePolicy(theta=1_000_000.0, aliases={"mrope": "default"}, ignored=MROPE_FIELDS)
    hf_windows = WindowPolicy(
        SWITCHED_WINDOW.fields,
        lambda config, n_layers: SWITCHED_WINDOW.read({"max_window_layers": 80, **config}, n_layers),
    )
    hf_fields = dense_fields(num_key_value_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-5)


@dataclass
class Qwen25VLModelArgs(Qwen25VLTextModelArgs, VisionLanguageModelArgs):
    """Arguments of Qwen2.5-VL, see `Qwen25VLTextModelArgs` and `VisionLanguageModelArgs`."""

    image_token_id: int = 151655
    mrope_section: tuple[int, int, int] = (16, 24, 24)

    model_types = frozenset({"qwen2_5_vl"})
    mrope_interleaved = False

    @classmethod
    def read_vision(cls, config: Any) -> VisionSpec:
        """See `VisionLanguageModelArgs.read_vision`."""
        return read_windowed_vision(config)


class _Qwen25VLStateDictAdapter(VisionLanguageStateDictAdapter):
    encoder_map = WINDOWED_HF_MAP
    composite_names = _NAMES


class _Qwen25VLTextStateDictAdapter(CompositeStateDictAdapter):
    composite_names = _NAMES


Qwen25VLTextModel = BaseArchonModel[Qwen25VLTextModelArgs]
Qwen25VLTextStateDictAdapter, _, TEXT = define_family(
    "qwen2_5_vl_text", Qwen25VLTextModel, adapter=_Qwen25VLTextStateDictAdapter
)
Qwen25VLModel = VisionLanguageModel[Qwen25VLModelArgs]
Qwen25VLStateDictAdapter, parallelize_qwen2_5_vl, SPEC = define_family(
    "qwen2_5_vl", Qwen25VLModel, adapter=_Qwen25VLStateDictAdapter, text=TEXT
)
