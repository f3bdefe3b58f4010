"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388): the shared decoder with RMS norms over each head's queries and
keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import SWITCHED_WINDOW, Field, WindowPolicy, dense_fields
from archon.models.hf.names import DENSE_HF_MAP, QK_NORM_HF_MAP
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.parallelize import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec


@dataclass
class Qwen3ModelArgs(BaseModelArgs):
    """See `BaseModelArgs`; `attention_bias` puts biases on all four projections."""

    qk_norm: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3"})
    hf_windows: ClassVar[WindowPolicy] = SWITCHED_WINDOW
    hf_fields: ClassVar[dict[str, Field]] = dense_fields(num_key_value_heads=32, max_position_embeddings=32768) | {
        "head_dim": Field("head_dim", int, 128),
        "attention_bias": Field("attention_bias", bool, False),
    }

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        super().__post_init__()


class Qwen3Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Qwen3ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen3ModelArgs


class Qwen3StateDictAdapter(BaseStateDictAdapter):
    """Maps the common names of dense decoders, and the norms of queries and keys."""

    model_class = Qwen3Model
    from_hf_map = DENSE_HF_MAP | QK_NORM_HF_MAP


parallelize_qwen3 = make_parallelize_fn(DENSE_TP_PLAN)

SPEC = family_spec("qwen3", Qwen3StateDictAdapter, parallelize_qwen3)
