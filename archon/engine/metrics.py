"""Sums of a batch's loss and metrics, read in one transfer from the device."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from archon.engine.loss import Metrics
from archon.parallel.comm import all_reduce
from archon.parallel.ranks import Ranks
from archon.parallel.transfer import to_device_async
from archon.schema.errors import ConfigError


class MetricSums:
    """Loss of a batch, and sums and counts of its metrics, on the device until all are read at once.

    Attributes:
        loss: float64 scalar.
        losses: the `NAME/loss` of each LoRA in a multi-LoRA model.
        sums: the sum of each metric.
        counts: the count of each metric.
    """

    def __init__(self, device: torch.device, losses: Iterable[str] = ()) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.losses = {name: torch.zeros_like(self.loss) for name in losses}
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def add(self, metrics: Metrics, prefix: str = "") -> None:
        """Add the metrics of a micro-batch, with a prefix to their names."""
        for metric, value in metrics.items():
            if not isinstance(value, tuple) or not all(isinstance(part, Tensor) for part in value) or len(value) != 2:
                raise ConfigError(f"metric {metric!r} is a {type(value).__name__}; expected tensors (sum, count)")
            total, count = value
            name = prefix + metric
            self.sums[name] = self.sums.get(name, 0) + total.detach().double()
            self.counts[name] = self.counts.get(name, 0) + count.detach().double()

    def read(self, ranks: Ranks, replicated: Mapping[str, Tensor], **scalars: Tensor) -> dict[str, float]:
        """Read all numbers in one transfer from the device.

        Args:
            ranks: the ranks of the layout.
            replicated: scalars that are equal on all ranks.
            scalars: further scalars to sum over data-parallel ranks.

        Returns:
            The sum over data-parallel ranks of the loss and of `scalars`, the sum / count of every metric with a count
            other than 0, and the `replicated` scalars.
        """
        scalars = {"loss": self.loss, **self.losses, **scalars}
        if self.losses:
            self._join_names(ranks)
        _require_same_names([*scalars, *self.sums], ranks)
        device = self.loss.device
        tensors = [*scalars.values(), *self.sums.values(), *self.counts.values()]
        summed, same = (
            [to_device_async(x.detach(), device).to(torch.float64).reshape(1) for x in some]
            for some in (tensors, replicated.values())
        )
        values = torch.cat([all_reduce(torch.cat(summed), ranks.dp), *same]).tolist()
        result = dict(zip([*scalars, *replicated], values[: len(scalars)] + values[len(summed) :], strict=True))
        sums = values[len(scalars) :][: len(self.sums)]
        counts = values[len(scalars) + len(self.sums) : len(summed)]
        result.update({name: s / c for name, s, c in zip(self.sums, sums, counts, strict=True) if c})
        return result

    def _join_names(self, ranks: Ranks) -> None:
        """Give every data-parallel rank the metrics of all ranks: some may have no document of a LoRA."""
        names_of_ranks: list[list[str]] = [[] for _ in range(ranks.dp.size)]
        if ranks.dp.size > 1:
            torch.distributed.all_gather_object(names_of_ranks, [*self.sums], group=ranks.dp.process_group)
        zero = torch.zeros_like(self.loss)
        names = sorted({*self.sums}.union(*names_of_ranks))
        self.sums = {name: self.sums.get(name, zero) for name in names}
        self.counts = {name: self.counts.get(name, zero) for name in names}


def _require_same_names(names: Sequence[str], ranks: Ranks) -> None:
    """Raise RuntimeError on every rank if data-parallel ranks have metrics of different names."""
    if ranks.dp.size == 1:
        return
    digest = float(zlib.crc32(" ".join(names).encode()))
    low, high = all_reduce(torch.tensor([-digest, digest], dtype=torch.float64), ranks.dp, "max").tolist()
    if -low != high:
        raise RuntimeError(
            f"data-parallel ranks report different metrics, this one {', '.join(names)}; "
            "a loss function must give the same names for every micro-batch"
        )
