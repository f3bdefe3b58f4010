"""What distinguishes a Qwen2 config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from archon.models.args import BaseModelArgs
from archon.models.hf_config import DENSE_FIELDS, Field


@dataclass
class Qwen2ModelArgs(BaseModelArgs):
    """Qwen2 and Qwen2.5: biases on queries, keys and values always, on the output projection never."""

    attention_bias: bool = True

    model_types: ClassVar[frozenset[str]] = frozenset({"qwen2"})
    # transformers' Qwen2 honours `head_dim` though its config class does not declare it.
    hf_fields: ClassVar[dict[str, Field]] = DENSE_FIELDS | {"head_dim": Field("head_dim", int, 0, optional=True)}
