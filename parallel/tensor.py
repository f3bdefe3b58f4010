"""Tensor parallelism with sequence parallelism (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al.
2022, arXiv:2205.05198): weights are split by role, and between the split products each rank holds its share of tokens.

A layer declares a role; a plan says what becomes of a role's weight. Activations stay plain tensors: a layer gathers
its tokens before a column product and scatters the sum after a row product (`archon.parallel.comm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from archon.parallel.comm import Group
from archon.schema.errors import LayoutError

Treatment = Literal["split_rows", "split_columns", "replicate"]
"""What becomes of a weight [out, in]: split along out, along in, or whole on every rank. A bias follows `out`."""


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Treatment]) -> None:
    """Split every layer with a role in `plan` over `mesh`, in place, and tell it and its parent about the group.

    A layer whose rows form heads (`heads`) is split between heads; where there are fewer heads than ranks it stays
    whole, and each rank computes the head it shares with its neighbors. Raises LayoutError for a size that the degree
    does not divide.
    """
    group = Group.of(mesh)
    for name, module in model.named_modules():
        role: str | None = getattr(module, "role", None)
        if hasattr(module, "tp"):
            module.tp = group
        if role is None or role == "experts":
            continue
        if role not in plan:
            raise LayoutError(f"{name}: the tensor-parallel plan says nothing of the role {role!r}")
        _split(name, module, mesh, group, plan[role])


def _split(name: str, module: Any, mesh: DeviceMesh, group: Group, treatment: Treatment) -> None:
    weight, bias = module.weight, getattr(module, "bias", None)
    placement: Placement = Replicate()
    if treatment == "split_rows":
        heads = getattr(module, "heads", None)
        units = weight.shape[0] if heads is None else heads
        if units % group.size == 0:
            placement = Shard(0)
        elif heads is not None and group.size % heads == 0:
            rows = weight.shape[0] // heads
            start = group.rank * heads // group.size * rows
            module.rows = slice(start, start + rows)
        else:
            raise LayoutError(f"tp = {group.size} does not divide the {units} {_unit(heads)} of {name}")
    elif treatment == "split_columns":
        if weight.shape[1] % group.size:
            raise LayoutError(f"tp = {group.size} does not divide the {weight.shape[1]} input features of {name}")
        placement = Shard(1)
    # A tied weight is met twice and split once.
    if not isinstance(weight, DTensor):
        _replace(module, "weight", mesh, placement)
    if bias is not None:
        _replace(module, "bias", mesh, placement if placement == Shard(0) else Replicate())


def _unit(heads: int | None) -> str:
    return "output features" if heads is None else "heads"


def _replace(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Exchange a whole parameter for this rank's part of it, as a DTensor."""
    whole = getattr(module, name)
    setattr(module, name, nn.Parameter(shard(whole.detach(), mesh, (placement,)), requires_grad=whole.requires_grad))


def shard(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Cut this rank's part out of a tensor that every rank holds, or that is on the meta device; nothing is sent."""
    part = whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            part = part.chunk(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
    return DTensor.from_local(
        part.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
