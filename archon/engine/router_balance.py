"""What routers did in a batch: their load, by which biases rise below the mean and else fall (Wang et al. 2024,
arXiv:2408.15664), and how many tokens used the experts that they were given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from archon.models.base import BaseArchonModel
from archon.models.layers.moe import expert_biases
from archon.parallel.comm import all_reduce
from archon.parallel.ranks import Ranks


class RouterLoad:
    """How often the routers of one model, or of one pipeline stage, chose each expert since `clear`.

    `replay` is None or float64 [3], sums over the layers of the forwards that were given experts: tokens, those with
    given experts, and those of them for which the router would have chosen others.
    """

    def __init__(self, model: BaseArchonModel) -> None:
        self.model = model
        self._counts: Tensor | None = None
        self.replay: Tensor | None = None

    def clear(self) -> None:
        self._counts = self.replay = None

    def add(self) -> None:
        """Count the choices of the model's last forward, without padding. Not called for recomputed forwards."""
        if not self.model.router_stats:
            return
        counts = torch.stack([stats.counts.detach() for stats in self.model.router_stats]).double()
        self._counts = counts if self._counts is None else self._counts + counts
        replays = [
            torch.stack([stats.tokens.double(), stats.replayed.double(), stats.changed.double()])
            for stats in self.model.router_stats
            if stats.replayed is not None and stats.changed is not None
        ]
        if replays:
            replay = torch.stack(replays).sum(0)
            self.replay = replay if self.replay is None else self.replay + replay

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


def replay_metrics(loads: Sequence[RouterLoad], ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Returns what the routers of all ranks, which all call it, did with given experts, as scalars on the device.

    `router_replay/share` is the share of tokens that were given their experts, `router_replay/changed` the share of
    those for which a router would have chosen others, both over all layers with experts; NaN where no forward was given
    any.
    """
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for load in loads:
        if load.replay is not None:
            total = total + load.replay
    for group in (ranks.dp, ranks.cp, ranks.tp, ranks.pp):
        total = all_reduce(total, group)
    tokens, replayed, changed = total.unbind()
    return {"router_replay/share": replayed / tokens, "router_replay/changed": changed / replayed.clamp(min=1)}
