"""Collectives that autograd can pass through, each named by what its backward pass does.

All work along the first axis. A tensor that leaves `all_gather` is used by every rank in another way (with another
shard of a weight), so its gradients are summed; one that leaves `all_gather_replicated` is used by every rank in the
same way (one loss, computed by each), so each rank keeps its slice of the gradient it has. They call functional
collectives, which `torch.compile` and the fake process group understand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from archon.parallel.torch_groups import group_by_name
from archon.parallel.torch_parts import require_parts

PARTS = (
    "torch.ops._c10d_functional.all_gather_into_tensor.default",
    "torch.ops._c10d_functional.reduce_scatter_tensor.default",
    "torch.ops._c10d_functional.all_to_all_single.default",
    "torch.ops._c10d_functional.all_reduce.default",
    "torch.ops._c10d_functional.wait_tensor.default",
)
require_parts("collectives", PARTS)

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """One process group, as the layers that communicate over it hold it."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """The group of a one-dimensional mesh."""
        return cls.of_process_group(mesh.get_group())

    @classmethod
    def of_process_group(cls, group: dist.ProcessGroup) -> Group:
        """A group that this process belongs to."""
        return cls(group.group_name, group.size(), group.rank())

    @property
    def process_group(self) -> dist.ProcessGroup:
        return group_by_name(self.name)


def _wait(x: Tensor) -> Tensor:
    return _ops.wait_tensor(x)


def _gather(x: Tensor, group: Group) -> Tensor:
    return _wait(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    return _wait(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


def _exchange(x: Tensor, out_splits: list[int], in_splits: list[int], group: Group) -> Tensor:
    return _wait(_ops.all_to_all_single(x.contiguous(), out_splits, in_splits, group.name))


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """The sum (or `op`: sum, max, min, avg) over the ranks; not differentiable."""
    return x if group.size == 1 else _wait(_ops.all_reduce(x.contiguous(), op, group.name))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, replicated: bool) -> Tensor:
        ctx.group, ctx.replicated = group, replicated
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.replicated:
            return _reduce_scatter(grad, ctx.group), None, None
        rows = grad.shape[0] // ctx.group.size
        return grad.narrow(0, ctx.group.rank * rows, rows).contiguous(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


class _AllReduceReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out_splits: list[int], in_splits: list[int], group: Group) -> Tensor:
        ctx.splits, ctx.group = (in_splits, out_splits), group
        return _exchange(x, out_splits, in_splits, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out_splits, in_splits = ctx.splits
        return _exchange(grad, out_splits, in_splits, ctx.group), None, None, None


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Shards [n, ...] to the whole [size * n, ...]; gradients of the ranks are summed, each gets its shard's."""
    return x if group.size == 1 else _AllGather.apply(x, group, False)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Terms [size * n, ...] to this rank's shard [n, ...] of their sum; the gradient is gathered."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


def all_gather_replicated(x: Tensor, group: Group) -> Tensor:
    """Shards [n, ...] to the whole [size * n, ...], for a computation that every rank repeats; the gradient is cut."""
    return x if group.size == 1 else _AllGather.apply(x, group, True)


def all_reduce_replicated(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' terms, for a computation that every rank repeats; the gradient passes unchanged."""
    return x if group.size == 1 else _AllReduceReplicated.apply(x, group)


def all_to_all(
    x: Tensor, group: Group, out_splits: list[int] | None = None, in_splits: list[int] | None = None
) -> Tensor:
    """Rows for each rank, in rank order, against rows from each rank, in rank order; equal splits by default."""
    if group.size == 1:
        return x
    equal = [x.shape[0] // group.size] * group.size
    return _AllToAll.apply(x, out_splits or equal, in_splits or equal, group)


@overload
def local(parameter: Tensor) -> Tensor: ...
@overload
def local(parameter: None) -> None: ...
@overload
def local(parameter: Tensor | None) -> Tensor | None: ...
def local(parameter: Tensor | None) -> Tensor | None:
    """This rank's part of a parameter, for use in a layer; a plain tensor is its own part.

    A rank computes with a shard alone, so the shard's gradient is whole. A replicated parameter meets other tokens or
    other heads on every rank, so that what a rank finds is one term of the gradient, to be summed.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])
