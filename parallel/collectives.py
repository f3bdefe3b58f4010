"""Count the collectives of a block of code by kind and group, with their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.parallel.dims import ArchonParallelDims
from archon.parallel.torch_private import TorchDispatchMode, group_by_name, script_type, tree_leaves

# Operator name (functional, c10d with lists, c10d with one tensor) -> reported kind.
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
class CollectiveType:
    """A kind of collective and its group; `group` is a mesh dimension such as tp or dp_shard_cp."""

    kind: str
    group: str
    size: int


@dataclass(frozen=True)
class CollectiveStats:
    """Number of collectives and their bytes, counting the larger of input and output."""

    count: int = 0
    bytes: int = 0


class CollectiveRecorder(TorchDispatchMode):
    """Context manager that counts collectives, also of FSDP and pipelines.

        with CollectiveRecorder(group_names(dims)) as recorder:
            engine.train_batch(...)
        recorder.sums  # {CollectiveType: CollectiveStats}

    Args:
        names: mesh dimension by torch group name; other groups are reported as `other`.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names
        self.sums: dict[CollectiveType, CollectiveStats] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # dispatched again with the local tensors
        self.record(func, args)
        return func(*args, **(kwargs or {}))

    def record(self, func: Any, args: Any) -> None:
        """Count `func` if it is a collective."""
        kind = collective_kind(func.namespace, func.overloadpacket.__name__)
        if kind is None:
            return
        group = collective_group(args)
        traffic = CollectiveType(kind, self.names.get(group.group_name, "other"), group.size())
        # A functional all-gather has only its input among its arguments.
        factor = group.size() if func.overloadpacket.__name__ == "all_gather_into_tensor" else 1
        largest = max(sum(x.nbytes for x in tree_leaves(arg) if isinstance(x, Tensor)) for arg in args)
        before = self.sums.get(traffic, CollectiveStats())
        self.sums[traffic] = CollectiveStats(before.count + 1, before.bytes + factor * largest)


def collective_kind(namespace: str, operator: str) -> str | None:
    """Return the kind of a collective operator, such as all_gather; None for other operators and for waits."""
    return _KINDS.get(operator) if namespace in ("_c10d_functional", "c10d") else None


def collective_group(args: Any) -> dist.ProcessGroup:
    """Return the process group from the arguments of a collective: a group name or a boxed group."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in script_type(arg):
            return dist.ProcessGroup.unbox(arg)
    return group_by_name(args[-1])


def group_names(dims: ArchonParallelDims) -> dict[str, str]:
    """Return the mesh dimension of each process group of a layout, by torch's group name."""
    return {group.group_name: name for name, group in layout_groups(dims)}


def layout_groups(dims: ArchonParallelDims) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield (mesh dimension, group of this rank) once for each group with more than one rank.

    A group that serves several dimensions is reported under the first one.
    """
    seen = set()
    for sizes in dims.grids.values() if dims.world_size > 1 else ():
        for name, size in sizes.items():
            if size == 1 or name == "cp_tp":
                continue
            group = dims.get_group(name)
            if group.group_name not in seen:
                seen.add(group.group_name)
                yield name, group
