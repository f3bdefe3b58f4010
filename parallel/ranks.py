"""The process groups that the engine communicates over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from archon.parallel.comm import Group, all_reduce
from archon.parallel.control_plane import ControlPlane
from archon.parallel.dims import ArchonParallelDims
from archon.schema.errors import BatchError, UserError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SOLO = Group("", 1, 0)


@dataclass(frozen=True)
class Ranks:
    """This rank's groups. `dp` ranks have different documents; ranks of a `cp`, `tp` or `pp` group have the same
    ones."""

    pp: Group = SOLO
    dp: Group = SOLO
    cp: Group = SOLO
    tp: Group = SOLO

    @classmethod
    def of(cls, dims: ArchonParallelDims) -> Ranks:
        """Returns the groups of a layout, and makes their process groups: every rank must call it."""
        if dims.world_size == 1:
            return cls()
        groups = {name: Group.of(dims.get_mesh(name)) for name in ("pp", "dp", "cp", "tp")}
        return cls(**{name: group if group.size > 1 else SOLO for name, group in groups.items()})

    @property
    def split_tokens(self) -> bool:
        """Whether ranks split the tokens of a micro-batch."""
        return self.cp.size * self.tp.size > 1

    def sum(self, values: Tensor, groups: Sequence[Group]) -> Tensor:
        """Returns the sum of a tensor over the ranks of all groups."""
        for group in groups:
            values = all_reduce(values, group)
        return values

    def all_reduce_max(self, number: int, device: torch.device) -> int:
        """Returns the largest of the data-parallel ranks' numbers."""
        if self.dp.size == 1:
            return number
        return int(all_reduce(torch.tensor(number, device=device), self.dp, "max"))

    def require_on_all(self, prepare: Callable[[], Result], device: torch.device) -> Result:
        """Returns this rank's `prepare()`, once it has succeeded on every data-parallel rank.

        Where it raises a UserError on one rank, all raise: that rank its own error, the others a BatchError with the
        rank and its message.
        """
        if self.dp.size == 1:
            return prepare()
        try:
            result = prepare()
        except UserError as error:
            self.all_reduce_max(1, device)
            ControlPlane.of_run().all_gather(str(error).encode())
            raise
        if self.all_reduce_max(0, device):
            messages = [data.decode() for data in ControlPlane.of_run().all_gather(b"")]
            rank, message = next((rank, text) for rank, text in enumerate(messages) if text)
            raise BatchError(f"rank {rank} refused its share of the batch: {message}")
        return result
