"""Qwen3-MoE checkpoints: Qwen3's names, a router, and one set of matrices for each expert."""

from __future__ import annotations

from archon.models.qwen3_moe.model import Qwen3MoEModel
from archon.models.state_dict import DENSE_HF_MAP, EXPERTS_HF_MAP, QK_NORM_HF_MAP, BaseStateDictAdapter


class Qwen3MoEStateDictAdapter(BaseStateDictAdapter):
    """See `BaseStateDictAdapter`."""

    model_class = Qwen3MoEModel
    from_hf_map = DENSE_HF_MAP | QK_NORM_HF_MAP | EXPERTS_HF_MAP
