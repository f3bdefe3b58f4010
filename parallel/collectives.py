"""What a piece of work sends: every collective it starts, by kind and group, with its count and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.parallel.dims import ArchonParallelDims
from archon.parallel.torch_dispatch import TorchDispatchMode, tree_leaves
from archon.parallel.torch_groups import group_by_name

# Of torch's names for one operation (functional, c10d with lists, c10d with one tensor) the one that is reported.
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}


@dataclass(frozen=True, order=True)
class Traffic:
    """A kind of collective and the group it runs over; `group` is a mesh dimension such as tp or dp_shard_cp."""

    kind: str
    group: str
    size: int


@dataclass(frozen=True)
class Sum:
    """How many collectives, and the bytes of each one's larger side: what a gather gives, a reduce-scatter is given."""

    count: int = 0
    bytes: int = 0


class CollectiveRecorder(TorchDispatchMode):
    """Counts the collectives started within it, functional ones and those FSDP and pipelines start.

    with CollectiveRecorder(group_names(dims)) as recorder:
        engine.train_batch(...)
    recorder.sums  # {Traffic: Sum}

    Args:
        names: of process groups, by torch's name; a group without a name is reported as `other`.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names
        self.sums: dict[Traffic, Sum] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes back with its local tensors
        self.note(func, args)
        return func(*args, **(kwargs or {}))

    def note(self, func: Any, args: Any) -> None:
        """Count `func` if it is a collective."""
        kind = collective_kind(func)
        if kind is None:
            return
        group = collective_group(args)
        traffic = Traffic(kind, self.names.get(group.group_name, "other"), group.size())
        # A functional all-gather is given its part alone.
        factor = group.size() if func._opname == "all_gather_into_tensor" else 1
        found = self.sums.get(traffic, Sum())
        self.sums[traffic] = Sum(found.count + 1, found.bytes + factor * _largest(args))


def collective_kind(func: Any) -> str | None:
    """all_gather, all_to_all and so on for an operator that starts one; None for any other, waiting included."""
    return kind_of(func.namespace, func._opname)


def kind_of(namespace: str, operator: str) -> str | None:
    """As `collective_kind`, by an operator's name."""
    return _KINDS.get(operator) if namespace in ("_c10d_functional", "c10d") else None


def collective_group(args: Any) -> dist.ProcessGroup:
    """The process group among a collective's arguments: by name for functional ones, else boxed."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return group_by_name(args[-1])


def _largest(args: Any) -> int:
    """Bytes of the larger side, each a tensor or a list of them."""
    sides = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
    return max(sum(x.numel() * x.element_size() for x in side) for side in sides)


def group_names(dims: ArchonParallelDims) -> dict[str, str]:
    """The mesh dimension of each process group of a layout, by torch's name of the group."""
    return {group.group_name: name for name, group in layout_groups(dims)}


def layout_groups(dims: ArchonParallelDims) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """(mesh dimension, this rank's group) for each group of a layout that has more than one rank, once: a group that
    serves several dimensions, as that of all ranks may, goes by the first."""
    seen = set()
    for sizes in dims.grids.values() if dims.world_size > 1 else ():
        for name, size in sizes.items():
            if size == 1 or name == "cp_tp":
                continue
            group = dims.get_group(name)
            if group.group_name not in seen:
                seen.add(group.group_name)
                yield name, group
