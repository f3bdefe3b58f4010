"""Tensor parallelism with sequence parallelism: shard weights by role, and tokens between the matmuls.

Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.

A layer declares a role, and a plan maps roles to shardings. Activations stay plain tensors: a layer gathers its tokens
before a column-parallel matmul and reduce-scatters the sum after a row-parallel one (`archon.parallel.comm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from archon.parallel.comm import Group
from archon.schema.errors import LayoutError

ParallelStyle = Literal["split_rows", "split_columns", "replicate"]
"""A weight [out, in] is split along out, along in, or replicated. A bias, or another vector, follows `out`."""
_PLACEMENTS: dict[ParallelStyle, Placement] = {
    "split_rows": Shard(0),
    "split_columns": Shard(1),
    "replicate": Replicate(),
}


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Split every layer with a role in `plan` over `mesh`, in place, and set `tp` to the group where a module has it.

    A module has one role for its `weight` and `bias`; `parameter_roles` has the roles of other parameters. A layer with
    `heads` is split between heads; with fewer heads than ranks it is replicated, and each rank computes the head that
    it shares with its neighbors.

    Raises:
        LayoutError: the degree does not divide a size.
    """
    group = Group.from_mesh(mesh)
    for name, module in model.named_modules():
        role: str | None = getattr(module, "role", None)
        if hasattr(module, "tp"):
            module.tp = group
        if role is not None and role != "experts":
            _split(name, module, mesh, group, _parallel_style(plan, role, name))
        further: Mapping[str, str] = getattr(module, "parameter_roles", {})
        for parameter, parameter_role in further.items():
            if getattr(module, parameter) is not None:
                full_name = f"{name}.{parameter}"
                _split_parameter(full_name, module, mesh, _parallel_style(plan, parameter_role, full_name))


def _parallel_style(plan: Mapping[str, ParallelStyle], role: str, name: str) -> ParallelStyle:
    if role not in plan:
        roles = ", ".join(plan)
        raise LayoutError(f"{name}: the tensor-parallel plan has no entry for the role {role!r}; it has {roles}")
    return plan[role]


def _split(name: str, module: Any, mesh: DeviceMesh, group: Group, style: ParallelStyle) -> None:
    bias, quantized = getattr(module, "bias", None), getattr(module, "quantized", None)
    weight = module.weight if quantized is None else quantized
    placement: Placement = Replicate()
    if style == "split_rows":
        heads = getattr(module, "heads", None)
        units = weight.shape[0] if heads is None else heads
        if units % group.size == 0:
            placement = Shard(0)
        elif heads is not None and group.size % heads == 0:
            rows = weight.shape[0] // heads
            start = group.rank * heads // group.size * rows
            module.rows = slice(start, start + rows)
        else:
            unit = "output features" if heads is None else "heads"
            raise LayoutError(f"tp = {group.size} does not divide the {units} {unit} of {name}")
    elif style == "split_columns":
        if weight.shape[1] % group.size:
            raise LayoutError(f"tp = {group.size} does not divide the {weight.shape[1]} input features of {name}")
        placement = Shard(1)
    # named_modules visits a tied weight twice; shard it once.
    if quantized is not None:
        quantized.shard(mesh, placement, name)
    elif not isinstance(weight, DTensor):
        shard_parameter(module, "weight", mesh, (placement,))
    if bias is not None:
        shard_parameter(module, "bias", mesh, (placement if placement == Shard(0) else Replicate(),))
    for lora_layer in lora_layers(getattr(module, "lora", None)):
        # a [r, in] is split with the columns of the weight, b [out, r] with its rows.
        shard_parameter(lora_layer, "a", mesh, (placement if placement == Shard(1) else Replicate(),))
        shard_parameter(lora_layer, "b", mesh, (placement if placement == Shard(0) else Replicate(),))
        if lora_layer.magnitude is not None:
            rows = placement if placement == Shard(0) else Replicate()
            shard_parameter(lora_layer.magnitude, "weight", mesh, (rows,))


def lora_layers(lora: Any) -> list[Any]:
    """Return the LoRA layers of a matrix: none, one, or several."""
    if lora is None:
        return []
    return list(lora.values()) if isinstance(lora, nn.ModuleDict) else [lora]


def _split_parameter(name: str, module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Shard a parameter other than `weight` along its rows or columns, or replicate it."""
    parameter = name.rpartition(".")[2]
    shape, placement = getattr(module, parameter).shape, _PLACEMENTS[style]
    if isinstance(placement, Shard) and shape[placement.dim] % mesh.size():
        raise LayoutError(f"tp = {mesh.size()} does not divide dimension {placement.dim} of {name}, {tuple(shape)}")
    shard_parameter(module, parameter, mesh, (placement,))


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """Replace a replicated or meta parameter by a DTensor with the local shard."""
    full = getattr(module, name)
    part = full.detach()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            part = part.chunk(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
    sharded = DTensor.from_local(
        part.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    setattr(module, name, nn.Parameter(sharded, requires_grad=full.requires_grad))
