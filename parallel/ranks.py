"""The ranks of a run: who holds which documents and which of their tokens, and what is summed over whom."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from archon.parallel.comm import Group, all_reduce
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.world import World
from archon.schema.errors import BatchError, UserError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SOLO = Group("", 1, 0)


@dataclass(frozen=True)
class Ranks:
    """The groups of this rank that the engine communicates over. `dp` ranks hold different documents; those of one
    `cp`, `tp` and `pp` group are given the same ones."""

    pp: Group = SOLO
    dp: Group = SOLO
    cp: Group = SOLO
    tp: Group = SOLO

    @classmethod
    def of(cls, dims: ArchonParallelDims) -> Ranks:
        """Makes the process groups; every rank must call it."""
        if dims.world_size == 1:
            return cls()
        groups = {name: Group.of(dims.get_mesh(name)) for name in ("pp", "dp", "cp", "tp")}
        return cls(**{name: group if group.size > 1 else SOLO for name, group in groups.items()})

    @property
    def split_tokens(self) -> bool:
        """Whether a rank holds a part of a micro-batch's tokens."""
        return self.cp.size * self.tp.size > 1

    def sum(self, values: Tensor, groups: Sequence[Group]) -> Tensor:
        """The sum of a tensor over the ranks of each group in turn."""
        for group in groups:
            values = all_reduce(values, group)
        return values

    def most(self, number: int, device: torch.device) -> int:
        """The largest of the data-parallel ranks' numbers."""
        if self.dp.size == 1:
            return number
        return int(all_reduce(torch.tensor(number, device=device), self.dp, "max"))

    def require_on_all(self, prepare: Callable[[], Result], device: torch.device) -> Result:
        """Returns this rank's `prepare()`, once it has gone well on every data-parallel rank.

        Where one refuses its share by a `UserError` all of them raise: that rank its own error, the others a BatchError
        with its number and message.
        """
        if self.dp.size == 1:
            return prepare()
        try:
            result = prepare()
        except UserError as error:
            self.most(1, device)
            World.now().gather(str(error).encode())
            raise
        if self.most(0, device):
            messages = [data.decode() for data in World.now().gather(b"")]
            rank, message = next((rank, text) for rank, text in enumerate(messages) if text)
            raise BatchError(f"rank {rank} refused its share of the batch: {message}")
        return result
