"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention and group-limited experts."""

from dataclasses import dataclass

from archon.models.args.latent import DEEPSEEK_V3_FIELDS, LATENT_HF_MAP, LatentModelArgs
from archon.models.hf.mtp import MTPStateDictAdapter
from archon.models.spec import define_family


@dataclass
class DeepseekV3ModelArgs(LatentModelArgs):
    """Arguments of DeepSeek-V3, see `LatentModelArgs`."""

    model_types = frozenset({"deepseek_v3"})
    hf_fields = DEEPSEEK_V3_FIELDS


DeepseekV3Model, DeepseekV3StateDictAdapter, parallelize_deepseek_v3, SPEC = define_family(
    "deepseek_v3", DeepseekV3ModelArgs, LATENT_HF_MAP, adapter=MTPStateDictAdapter
)
