"""Bias-based balancing of experts (Wang et al. 2024, arXiv:2408.15664): biases rise below the mean load, else fall."""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.base import BaseArchonModel
from archon.models.layers.moe import expert_biases
from archon.parallel.comm import all_reduce
from archon.parallel.ranks import Ranks


class RouterLoad:
    """How often the routers of one model, or of one pipeline stage, chose each expert since `clear`."""

    def __init__(self, model: BaseArchonModel) -> None:
        self.model = model
        self._counts: Tensor | None = None

    def clear(self) -> None:
        self._counts = None

    def add(self) -> None:
        """Count the choices of the model's last forward, without padding. Not called for recomputed forwards."""
        if not self.model.router_stats:
            return
        counts = torch.stack([stats.counts.detach() for stats in self.model.router_stats]).double()
        self._counts = counts if self._counts is None else self._counts + counts

    @torch.no_grad()
    def update_biases(self, rate: float, ranks: Ranks) -> None:
        """Add rate * sign(mean count - count) to the biases, in place and the same on every rank of these layers."""
        if self._counts is None:
            return
        counts = self._counts
        for group in (ranks.dp, ranks.cp, ranks.tp):
            counts = all_reduce(counts, group)
        for bias, own in zip(expert_biases(self.model).values(), counts, strict=True):
            bias += rate * torch.sign(own.mean() - own)
