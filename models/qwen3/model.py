"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388): the shared decoder with QK norm."""

from __future__ import annotations

from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.qwen3.args import Qwen3ModelArgs


class Qwen3Model(BaseArchonModel):
    """See `BaseArchonModel`; what differs is in `Qwen3ModelArgs`."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen3ModelArgs
