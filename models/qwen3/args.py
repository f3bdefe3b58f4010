"""What distinguishes a Qwen3 config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.args import BaseModelArgs
from archon.models.hf_config import DENSE_FIELDS, Field


@dataclass
class Qwen3ModelArgs(BaseModelArgs):
    """Qwen3: RMS norms over each head's queries and keys; `attention_bias` puts biases on all four projections."""

    qk_norm: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen3"})
    hf_fields: ClassVar[dict[str, Field]] = DENSE_FIELDS | {
        "head_dim": Field("head_dim", int, 128),
        "attention_bias": Field("attention_bias", bool, False),
    }

    def __post_init__(self) -> None:
        self.attention_out_bias = self.attention_bias
        super().__post_init__()
