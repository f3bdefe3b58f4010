"""Checkpoints with layers after the last one, which predict further tokens (DeepSeek-AI 2024, section 2.2)."""

from __future__ import annotations

from typing import Any

from archon.models.hf.config import as_dict
from archon.models.hf.state_dict import BaseStateDictAdapter

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")


class MTPStateDictAdapter(BaseStateDictAdapter):
    """Carries the layers that predict further tokens, which archon does not compute.

    They are as many as `num_nextn_predict_layers` or `num_mtp_layers` of the config says. Published configs without
    either, or with 0, have up to one of them.
    """

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, *args, **kwargs)
        config, last = as_dict(hf_config), self.args.n_layers
        count = max(1, *(config.get(name) or 0 for name in _COUNTS))
        self.passthrough = tuple(f"model.layers.{layer}.*" for layer in range(last, last + count))
