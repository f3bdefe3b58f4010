"""Kimi K2 (Moonshot AI 2025, arXiv:2507.20534): DeepSeek-V3 with other sizes and its own `model_type`.

transformers has no class for it; the published code has the defaults of DeepSeek-V3.
"""

from dataclasses import dataclass

from archon.models.args.latent import LATENT_HF_MAP
from archon.models.base import BaseArchonModel
from archon.models.deepseek_v3 import DeepseekV3ModelArgs
from archon.models.hf.state_dict import MTPStateDictAdapter
from archon.models.spec import define_family


@dataclass
class KimiK2ModelArgs(DeepseekV3ModelArgs):
    """Arguments of Kimi K2, see `DeepseekV3ModelArgs`."""

    model_types = frozenset({"kimi_k2"})


KimiK2Model = BaseArchonModel[KimiK2ModelArgs]
KimiK2StateDictAdapter, parallelize_kimi_k2, SPEC = define_family(
    "kimi_k2", KimiK2Model, LATENT_HF_MAP, adapter=MTPStateDictAdapter
)
