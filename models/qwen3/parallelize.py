"""How a Qwen3 is laid out: a plan over the roles its layers declare, and the shared order of application."""

from __future__ import annotations

from typing import Any

from torch import nn

from archon.models.layers.linear import DENSE_TP_PLAN


def parallelize_qwen3(model: nn.Module, parallel_dims: Any, **kwargs: Any) -> nn.Module:
    """Apply a layout in place; the arguments are those of `archon.parallel.decoder.parallelize_decoder`."""
    from archon.parallel.decoder import parallelize_decoder

    return parallelize_decoder(model, parallel_dims, DENSE_TP_PLAN, **kwargs)
