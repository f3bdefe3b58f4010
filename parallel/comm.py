"""Differentiable collectives along the first dimension, distinguished by their backward pass.

After `all_gather` and `all_reduce_sharded`, every rank computes something else with the result (for example with its
shard of a weight), so the backward sums the gradients of the ranks. After `all_gather_replicated` and
`all_reduce_replicated`, every rank repeats the same computation (for example the loss), so the backward keeps the local
gradient, or its slice. All are functional collectives: `torch.compile` and the fake process group support them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from archon.parallel.torch_private import functional_collectives as _ops
from archon.parallel.torch_private import group_by_name


@dataclass(frozen=True)
class Group:
    """Process group by name, with the rank of this process in it."""

    name: str
    size: int
    rank: int

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Group:
        """Return the group of a one-dimensional mesh."""
        return cls.from_process_group(mesh.get_group())

    @classmethod
    def from_process_group(cls, group: dist.ProcessGroup) -> Group:
        """Return a group that this process belongs to."""
        return cls(group.group_name, group.size(), group.rank())

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group."""
        return group_by_name(self.name)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group: equal on all members, unlike the name."""
        return tuple(dist.get_process_group_ranks(self.process_group))


def _gather(x: Tensor, group: Group) -> Tensor:
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


def _exchange(x: Tensor, out_splits: list[int], in_splits: list[int], group: Group) -> Tensor:
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), out_splits, in_splits, group.name))


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Return the sum (or `op`: sum, max, min, avg) over the ranks; not differentiable."""
    return x if group.size == 1 else _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.name))


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


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, replicated: bool) -> Tensor:
        ctx.group, ctx.replicated = group, replicated
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.replicated else all_reduce(grad, ctx.group), None, None


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
    """Gather shards [n, ...] to [size * n, ...]; the backward reduce-scatters the gradient."""
    return x if group.size == 1 else _AllGather.apply(x, group, False)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum [size * n, ...] over the ranks and return this rank's shard [n, ...]; the backward all-gathers."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


def all_gather_replicated(x: Tensor, group: Group) -> Tensor:
    """Gather shards [n, ...] to [size * n, ...] for a computation that every rank repeats; the backward slices."""
    return x if group.size == 1 else _AllGather.apply(x, group, True)


def all_reduce_replicated(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks for a computation that every rank repeats; the gradient passes unchanged."""
    return x if group.size == 1 else _AllReduce.apply(x, group, True)


def all_reduce_sharded(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks for computations that differ between ranks; the backward sums the gradient too."""
    return x if group.size == 1 else _AllReduce.apply(x, group, False)


def all_to_all(
    x: Tensor, group: Group, out_splits: list[int] | None = None, in_splits: list[int] | None = None
) -> Tensor:
    """Send each rank its rows and return the rows received, both in rank order; equal splits by default."""
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
    """Return the local shard of a DTensor parameter; a plain tensor is returned as is.

    Only one rank computes with a shard, so its gradient is complete. A replicated parameter is used with other tokens
    or heads on every rank, so its gradient is `Partial`: one term of a sum over ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])
