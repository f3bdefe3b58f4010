"""Kimi K2 and K2.5 (Moonshot AI 2025, arXiv:2507.20534): DeepSeek-V3 with other sizes and its own `model_type`.

transformers has no class for it; the published code has the defaults of DeepSeek-V3.
"""

from dataclasses import dataclass

from archon.models.args.latent import LATENT_HF_MAP
from archon.models.base import BaseArchonModel
from archon.models.deepseek_v3 import DeepseekV3ModelArgs
from archon.models.hf.composite import DECODER, CompositeStateDictAdapter
from archon.models.hf.config import CompositePolicy
from archon.models.hf.state_dict import MTPStateDictAdapter
from archon.models.spec import define_family

_IMAGE_FIELDS = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "projection_hidden_size",
    "projection_layer_norm_eps",
    # Fields of the published config alone.
    "media_placeholder_token_id",
    "video_placeholder",
    "use_unified_vision_chunk",
    "ignore_index",
    "pad_token_id",
)
_K25_NAMES = {
    DECODER: "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.mm_projector.": "mm_projector.",
}


@dataclass
class KimiK2ModelArgs(DeepseekV3ModelArgs):
    """Arguments of Kimi K2, see `DeepseekV3ModelArgs`."""

    model_types = frozenset({"kimi_k2", "kimi_k25"})
    composite_types = {"kimi_k25": "kimi_k2"}
    text_readers = {"deepseek_v3": DeepseekV3ModelArgs}  # as transformers writes it
    hf_composite = CompositePolicy(_IMAGE_FIELDS, ties=True)


class _KimiK2StateDictAdapter(CompositeStateDictAdapter, MTPStateDictAdapter):
    """Adapter of Kimi K2, alone or in Kimi K2.5; transformers 5.24 writes `blocks` in place of `layers`."""

    composite_names = (
        _K25_NAMES,
        {
            f"{DECODER}layers.": "language_model.model.blocks.",
            "model.mm_projector.pre_norm.": "model.mm_projector.pre_norm.",
            **_K25_NAMES,
        },
        {},
    )
    encoders = ("model.vision_tower.*", "model.mm_projector.pre_norm.*", "model.mm_projector.*")


KimiK2Model = BaseArchonModel[KimiK2ModelArgs]
KimiK2StateDictAdapter, parallelize_kimi_k2, SPEC = define_family(
    "kimi_k2", KimiK2Model, LATENT_HF_MAP, adapter=_KimiK2StateDictAdapter
)
