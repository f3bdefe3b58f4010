"""Checkpoints with multi-token-prediction layers after the last layer (DeepSeek-AI 2024, section 2.2)."""

from __future__ import annotations

from typing import Any

from archon.models.hf.config import as_dict
from archon.models.hf.state_dict import BaseStateDictAdapter

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")


class MTPStateDictAdapter(BaseStateDictAdapter):
    """Adapter that passes multi-token-prediction layers through, since archon does not run them.

    `num_nextn_predict_layers` or `num_mtp_layers` of the config is their number. Published checkpoints without either
    field, or with 0, have up to one such layer.
    """

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, *args, **kwargs)
        config, last = as_dict(hf_config), self.args.n_layers
        count = max(1, *(config.get(name) or 0 for name in _COUNTS))
        self.passthrough = tuple(f"model.layers.{layer}.*" for layer in range(last, last + count))
