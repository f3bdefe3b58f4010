"""Ministral 3 (Mistral AI 2025): Mistral with YaRN and queries that grow with the position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import Field, WindowPolicy, dense_fields, uniform_window
from archon.models.hf.rope import RopePolicy
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass
class Ministral3ModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; no projection has a bias."""

    model_types: ClassVar[frozenset[str]] = frozenset({"ministral3"})
    hf_windows: ClassVar[WindowPolicy] = uniform_window(default=None)
    hf_ropes: ClassVar[RopePolicy] = RopePolicy(
        parameters=_ROPE, query_beta_field="llama_4_scaling_beta", ignored=frozenset({"max_position_embeddings"})
    )
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(
        num_key_value_heads=8, max_position_embeddings=262144, rms_norm_eps=1e-5, pad_token_id=11
    ) | {"head_dim": Field("head_dim", int, 128, null=0)}


class Ministral3Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Ministral3ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Ministral3ModelArgs


class Ministral3StateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders."""

    model_class = Ministral3Model


parallelize_ministral3 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("ministral3", Ministral3StateDictAdapter, parallelize_ministral3)
