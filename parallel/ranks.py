"""Process groups of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from archon.parallel.comm import Group, all_reduce
from archon.parallel.control_plane import ControlPlane
from archon.parallel.dims import ArchonParallelDims
from archon.schema.errors import BatchError, UserError

Result = TypeVar("Result")

SOLO = Group("", 1, 0)


def stage_group(dims: ArchonParallelDims) -> Group:
    """Return all ranks of this rank's pipeline stage. A collective: every rank calls it."""
    if dims.world_size == 1:
        return SOLO
    from archon.parallel.mesh import default_group, shared_group

    world = default_group()
    if dims.pp == 1:
        return Group.from_process_group(world)
    size = dims.world_size // dims.pp
    stages = tuple(tuple(range(first, first + size)) for first in range(0, dims.world_size, size))
    group = shared_group(world, "stage", stages)
    assert group is not None  # every rank is in a stage
    return Group.from_process_group(group)


@dataclass(frozen=True)
class Ranks:
    """Groups of this rank. `dp` ranks have different documents; ranks of a `cp`, `tp` or `pp` group share documents."""

    pp: Group = SOLO
    dp: Group = SOLO
    cp: Group = SOLO
    tp: Group = SOLO

    @classmethod
    def from_dims(cls, dims: ArchonParallelDims) -> Ranks:
        """Return the groups of a layout, creating their process groups. A collective."""
        if dims.world_size == 1:
            return cls()
        groups = {name: Group.from_mesh(dims.get_mesh(name)) for name in ("pp", "dp", "cp", "tp")}
        return cls(**{name: group if group.size > 1 else SOLO for name, group in groups.items()})

    def all_reduce_max(self, number: int, device: torch.device) -> int:
        """Return the largest of the data-parallel ranks' numbers."""
        if self.dp.size == 1:
            return number
        return int(all_reduce(torch.tensor(number, device=device), self.dp, "max"))

    def all_reduce_any(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return for each flag whether any data-parallel rank has set it."""
        if self.dp.size == 1:
            return list(flags)
        reduced = all_reduce(torch.tensor(flags, dtype=torch.int32, device=device), self.dp, "max")
        return [bool(flag) for flag in reduced.tolist()]

    def require_on_all(self, prepare: Callable[[], Result], device: torch.device) -> Result:
        """Run `prepare` and return its result once it has succeeded on every data-parallel rank.

        If it raises a UserError on one rank, all ranks raise: that rank the original error, the other ranks a
        BatchError with the rank and its message.
        """
        if self.dp.size == 1:
            return prepare()
        error = None
        try:
            result = prepare()
        except UserError as raised:
            error = raised
        if not self.all_reduce_max(int(error is not None), device):
            return result
        messages = ControlPlane.world().all_gather(str(error or "").encode())
        if error is not None:
            raise error
        rank, message = next((rank, text.decode()) for rank, text in enumerate(messages) if text)
        raise BatchError(f"rank {rank} refused its share of the batch: {message}")
