"""Qwen3 checkpoints: the common names of dense decoders and the QK norms."""

from __future__ import annotations

from archon.models.qwen3.model import Qwen3Model
from archon.models.state_dict import DENSE_HF_MAP, QK_NORM_HF_MAP, BaseStateDictAdapter


class Qwen3StateDictAdapter(BaseStateDictAdapter):
    """See `BaseStateDictAdapter`."""

    model_class = Qwen3Model
    from_hf_map = DENSE_HF_MAP | QK_NORM_HF_MAP
