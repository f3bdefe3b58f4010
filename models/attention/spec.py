"""What a layer asks of attention, whoever computes it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from archon.schema.errors import ConfigError


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention of one layer.

    Args:
        scale: factor on the scores before the softmax.
        window: each token sees itself and the window - 1 tokens before it in its document; None for all.
        soft_cap: bounds the scaled scores to soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118); None for
            unbounded ones.
        sinks: [H], a score of each head that joins the denominator of the softmax and has no value (Xiao et al. 2023,
            arXiv:2309.17453); None for none.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def require(self, features: Collection[str], who: str) -> None:
        """Raises ConfigError where `who` computes only `features` of `window`, `soft_cap`, `sinks` and more is set."""
        for name in ("window", "soft_cap", "sinks"):
            if getattr(self, name) is not None and name not in features:
                known = ", ".join(sorted(features)) or "none of the options"
                raise ConfigError(f"{who} does not compute {name}, which a layer of this model sets; it knows {known}")
