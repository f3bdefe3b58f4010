"""Kimi K2 (Moonshot AI 2025, arXiv:2507.20534): DeepSeek-V3 with other sizes, and a `model_type` of its own.

transformers has no class for it; the published code has the defaults of DeepSeek-V3.
"""

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
class KimiK2ModelArgs(LatentModelArgs):
    """See `LatentModelArgs`; the first `n_dense_layers` layers have no experts."""

    model_types: ClassVar[frozenset[str]] = frozenset({"kimi_k2"})
    hf_fields: ClassVar[dict[str, Field]] = DEEPSEEK_V3_FIELDS


class KimiK2Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `KimiK2ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = KimiK2ModelArgs


class KimiK2StateDictAdapter(MTPStateDictAdapter):
    """Maps the names of latent attention, of the router's bias and of shared experts; the layers that predict further
    tokens are carried."""

    model_class = KimiK2Model
    from_hf_map = LATENT_HF_MAP


parallelize_kimi_k2 = make_parallelize_fn(MOE_TP_PLAN)

SPEC = family_spec("kimi_k2", KimiK2StateDictAdapter, parallelize_kimi_k2)
