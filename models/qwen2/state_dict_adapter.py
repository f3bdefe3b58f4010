"""Qwen2 checkpoints: the common names of dense decoders."""

from __future__ import annotations

from archon.models.qwen2.model import Qwen2Model
from archon.models.state_dict import BaseStateDictAdapter


class Qwen2StateDictAdapter(BaseStateDictAdapter):
    """See `BaseStateDictAdapter`."""

    model_class = Qwen2Model
