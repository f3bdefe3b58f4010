"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention, and experts chosen within groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.args.latent import DEEPSEEK_V3_FIELDS, LATENT_HF_MAP, LatentModelArgs
from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field
from archon.models.hf.mtp import MTPStateDictAdapter
from archon.models.parallelize import MOE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class DeepseekV3ModelArgs(LatentModelArgs):
    """See `LatentModelArgs`; the first `n_dense_layers` layers have no experts."""

    model_types: ClassVar[frozenset[str]] = frozenset({"deepseek_v3"})
    hf_fields: ClassVar[dict[str, Field]] = DEEPSEEK_V3_FIELDS


class DeepseekV3Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `DeepseekV3ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = DeepseekV3ModelArgs


class DeepseekV3StateDictAdapter(MTPStateDictAdapter):
    """Maps the names of latent attention, of the router's bias and of shared experts; the layers that predict further
    tokens are carried."""

    model_class = DeepseekV3Model
    from_hf_map = LATENT_HF_MAP


parallelize_deepseek_v3 = make_parallelize_fn(MOE_TP_PLAN)

SPEC = family_spec("deepseek_v3", DeepseekV3StateDictAdapter, parallelize_deepseek_v3)
