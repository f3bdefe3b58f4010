"""Attention options of a layer, for any backend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from archon.schema.errors import ConfigError


@dataclass(frozen=True)
class LayerIndex:
    """Index of a layer, the key of its cache.

    A class, because torch.compile treats a module's ints as constants and would compile every layer again.
    """

    value: int


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer.

    Args:
        scale: factor on the scores before the softmax.
        window: each token attends to itself and the window - 1 tokens before it in its document; None for all.
        soft_cap: replaces scaled scores by soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118).
        sinks: [H], one score per head that joins the softmax without a value (Xiao et al. 2023, arXiv:2309.17453).
        causal: False lets each token attend to its whole document, as image patches do; only in packed documents,
            without window, soft cap and sinks.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    causal: bool = field(default=True, kw_only=True)

    def unsupported_reason(self, features: Collection[str], backend: str) -> str | None:
        """Return which option `backend`, with these features, does not support, or None.

        The options are `window`, `soft_cap` and `sinks`, and `bidirectional` for non-causal attention.

        Raises:
            ConfigError: the options contradict each other.
        """
        options = [name for name in ("window", "soft_cap", "sinks") if getattr(self, name) is not None]
        if not self.causal:
            if options:
                raise ConfigError(f"attention that is not causal has {', '.join(options)}; expected none of them")
            options = ["bidirectional"]
        for name in options:
            if name not in features:
                supported = ", ".join(sorted(features)) or "none of these options"
                return f"{backend} does not support {name}, which a layer of this model sets; it supports {supported}"
        return None

    def with_wide_sinks(self, dtype: torch.dtype) -> AttentionSpec:
        """Return the options with sinks in at least float32, for several calls on queries of `dtype`.

        Autograd then sums the gradients of all calls before it rounds them to the dtype of the sinks.
        """
        if self.sinks is None:
            return self
        return replace(self, sinks=self.sinks.to(torch.promote_types(dtype, torch.float32)))

    def apply_soft_cap(self, scores: Tensor) -> Tensor:
        """Return scaled scores after the soft cap, if there is one."""
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over keys and a sink of scores [..., S, L], without the sink's column.

    `sinks` broadcast to [..., S]; None for an ordinary softmax.
    """
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
