"""Qwen2 (Yang et al. 2024, arXiv:2407.10671) and Qwen2.5: the shared decoder with query, key and value biases."""

from __future__ import annotations

from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.qwen2.args import Qwen2ModelArgs


class Qwen2Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Qwen2ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen2ModelArgs
