"""Router statistics of a batch: expert load, balancing biases and replayed experts.

Balancing biases follow the load without an auxiliary loss (Wang et al. 2024, arXiv:2408.15664).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from archon.models.base import BaseArchonModel
from archon.models.layers.moe import expert_biases
from archon.models.mtp import MTP_PREFIX
from archon.parallel.comm import all_reduce
from archon.parallel.ranks import Ranks


class RouterLoad:
    """Expert counts of one model or pipeline stage since `clear`.

    Attributes:
        replay: float64 [3], summed over MoE layers of forwards with `routed_experts`: tokens, replayed tokens, and
            replayed tokens for which the router prefers other experts. None without such a forward.
    """

    def __init__(self, model: BaseArchonModel) -> None:
        self.model = model
        self._counts: Tensor | None = None
        self.replay: Tensor | None = None

    def clear(self) -> None:
        """Reset all counts."""
        self._counts = self.replay = None

    def add(self) -> None:
        """Add the expert choices of the last forward, without padding or recomputation."""
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
        """Add rate * sign(mean count - count) to the biases, in place and equally on every rank.

        The biases of MTP layers stay as they are.
        """
        if self._counts is None:
            return
        counts = self._counts
        for group in (ranks.dp, ranks.cp, ranks.tp):
            counts = all_reduce(counts, group)
        biases = [bias for name, bias in expert_biases(self.model).items() if not name.startswith(MTP_PREFIX)]
        for bias, layer_counts in zip(biases, counts, strict=True):
            bias += rate * torch.sign(layer_counts.mean() - layer_counts)


def replay_metrics(loads: Sequence[RouterLoad], ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Return the replay metrics of all ranks as scalars on the device; every rank calls it.

    `router_replay/share` is the fraction of tokens with replayed experts. `router_replay/changed` is the fraction of
    replayed tokens for which the router prefers other experts. Both average over MoE layers and are NaN without replay.
    """
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for load in loads:
        if load.replay is not None:
            total = total + load.replay
    for group in (ranks.dp, ranks.cp, ranks.tp, ranks.pp):
        total = all_reduce(total, group)
    tokens, replayed, changed = total.unbind()
    return {"router_replay/share": replayed / tokens, "router_replay/changed": changed / replayed.clamp(min=1)}
