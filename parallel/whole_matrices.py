"""Whole matrices of sharded tensors: each rank computes some of them, and every rank gets its shards of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from operator import itemgetter

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.parallel.comm import Group, all_to_all
from archon.parallel.fsdp import shard_region

Region = tuple[slice, ...]

ROUND_BYTES = 2**26
"""Bytes of whole matrices that a rank computes at once, or one larger matrix."""


@dataclass
class Part:
    """Whole matrices of one tensor that one rank computes: a matrix, or some of the matrices of a stack.

    Attributes:
        tensor: index of the tensor.
        region: the part of the full tensor.
        owner: the rank of the group that computes it.
        regions: the region of each rank that holds some of the part.
    """

    tensor: int
    region: Region
    owner: int = 0
    regions: dict[int, Region] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return _shape(self.region)

    @property
    def cost(self) -> int:
        """Multiplications of a product of each matrix with its transpose, which is what the owners share evenly."""
        *stack, rows, columns = self.shape
        return torch.Size([*stack, rows, columns, min(rows, columns)]).numel()

    @cached_property
    def sources(self) -> dict[int, Region]:
        """The ranks that send their region to the owner, once it is chosen. Of ranks with equal regions, one sends."""
        sources = {_key(self.regions[self.owner]): self.owner} if self.owner in self.regions else {}
        for rank, region in self.regions.items():
            sources.setdefault(_key(region), rank)
        return {rank: self.regions[rank] for rank in sources.values()}


def plan_parts(tensors: Sequence[Tensor], group: Group) -> list[list[Part]]:
    """Return the rounds of a computation on whole matrices: in each, a rank computes up to `ROUND_BYTES`.

    Matrices that one rank holds whole, such as its experts, stay there. The others are dealt to the ranks that hold a
    part, the most expensive first, to the rank with the least work.

    Args:
        tensors: matrices [rows, columns] or stacks [n, rows, columns], DTensors on a mesh of the group's ranks.
        group: all ranks of the mesh.

    Returns:
        The parts of each round, equal on every rank of the group.
    """
    parts = [part for index, tensor in enumerate(tensors) for part in _tensor_parts(index, tensor, group)]
    work = [0] * group.size
    for part in sorted(parts, key=lambda part: -part.cost):
        part.owner = min(part.regions, key=lambda rank: (work[rank], rank))
        work[part.owner] += part.cost
    rounds: list[list[Part]] = []
    place = [(0, 0)] * group.size  # of each owner: its round, and the bytes of that round
    for part in parts:
        index, size = place[part.owner]
        part_bytes = torch.Size(part.shape).numel() * tensors[part.tensor].element_size()
        if size and size + part_bytes > ROUND_BYTES:
            index, size = index + 1, 0
        place[part.owner] = (index, size + part_bytes)
        while len(rounds) <= index:
            rounds.append([])
        rounds[index].append(part)
    return rounds


def apply_to_parts(
    function: Callable[[list[Tensor]], list[Tensor]],
    shards: Sequence[Tensor],
    local_regions: Sequence[Region],
    parts: Sequence[Part],
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace the shards of one round's parts by those of `function` of the whole matrices. A collective.

    Args:
        function: maps the whole parts of this rank to tensors of the same shapes.
        shards: this rank's shard of every tensor, written in place.
        local_regions: `local_region` of every tensor.
        parts: a round of `plan_parts`.
        group: the group of `plan_parts`.
        dtype: dtype of the whole matrices, and of the traffic.
        device: device of the collectives.
    """
    owned = [part for part in parts if part.owner == group.rank]
    wholes = {id(part): torch.empty(part.shape, dtype=dtype, device=device) for part in owned}

    def view(part: Part) -> Tensor:
        """Return this rank's shard of a part."""
        local = local_regions[part.tensor]
        return shards[part.tensor][_inside(part.regions[group.rank], local)]

    # 1. Collect the whole matrices.
    sent = [(part.owner, view(part)) for part in parts if group.rank in part.sources]
    received = [
        (rank, wholes[id(part)][_inside(region, part.region)])
        for part in owned
        for rank, region in part.sources.items()
    ]
    _exchange(sent, received, group, dtype, device)
    # 2. Compute on them, and return each rank's shard.
    results = function([wholes[id(part)] for part in owned])
    sent = [
        (rank, result[_inside(region, part.region)])
        for part, result in zip(owned, results, strict=True)
        for rank, region in part.regions.items()
    ]
    received = [(part.owner, view(part)) for part in parts if group.rank in part.regions]
    _exchange(sent, received, group, dtype, device)


def _exchange(
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Send each tensor to its rank, and fill the views of `received`, (rank, view); both in the order of the parts."""
    # 1. Copy what stays on this rank.
    local_tensors = [tensor for rank, tensor in sent if rank == group.rank]
    for view, tensor in zip((v for rank, v in received if rank == group.rank), local_tensors, strict=True):
        view.copy_(tensor)
    if group.size == 1:
        return
    # 2. Exchange the rest, sorted by rank.
    outgoing, incoming = (
        sorted(((rank, x) for rank, x in pairs if rank != group.rank), key=itemgetter(0)) for pairs in (sent, received)
    )
    in_splits, out_splits = [0] * group.size, [0] * group.size
    for pairs, splits in ((outgoing, in_splits), (incoming, out_splits)):
        for rank, x in pairs:
            splits[rank] += x.numel()
    flat = [x.to(device, dtype).flatten() for _, x in outgoing] or [torch.empty(0, dtype=dtype, device=device)]
    arrived = all_to_all(torch.cat(flat), group, out_splits, in_splits)
    for (_, view), piece in zip(incoming, arrived.split([view.numel() for _, view in incoming]), strict=True):
        view.copy_(piece.view(view.shape))


def _tensor_parts(index: int, tensor: Tensor, group: Group) -> list[Part]:
    """Return the parts of a tensor with the regions of all ranks; the owners are chosen later."""
    regions = _regions(tensor, group)
    if tensor.dim() == 2:
        return [Part(index, tuple(slice(0, size) for size in tensor.shape), regions=regions)]
    parts = []
    stacks = {(region[0].start, region[0].stop) for region in regions.values()}
    for start, stop in sorted(stacks):
        holders = {r: region for r, region in regions.items() if (region[0].start, region[0].stop) == (start, stop)}
        step = -(-(stop - start) // len(holders))
        for first in range(start, stop, step):
            chunk = slice(first, min(first + step, stop))
            whole = (chunk, *(slice(0, size) for size in tensor.shape[1:]))
            parts.append(Part(index, whole, regions={r: (chunk, *region[1:]) for r, region in holders.items()}))
    return parts


def _regions(tensor: Tensor, group: Group) -> dict[int, Region]:
    """Return the region of each rank of the group that holds some of the tensor."""
    if not isinstance(tensor, DTensor):
        return {group.rank: tuple(slice(0, size) for size in tensor.shape)}
    mesh, ranks = tensor.device_mesh, {rank: place for place, rank in enumerate(group.ranks)}
    regions = {}
    for coordinate in product(*map(range, mesh.shape)):
        region = shard_region(tensor, coordinate)
        if torch.Size(_shape(region)).numel():
            regions[ranks[int(mesh.mesh[coordinate])] if mesh.size() > 1 else group.rank] = region
    return dict(sorted(regions.items()))


def _inside(region: Region, outer: Region) -> Region:
    """Return a region relative to a region that contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, outer, strict=True))


def _shape(region: Region) -> tuple[int, ...]:
    return tuple(axis.stop - axis.start for axis in region)


def _key(region: Region) -> tuple[tuple[int, int], ...]:
    return tuple((axis.start, axis.stop) for axis in region)
