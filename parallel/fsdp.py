"""FSDP2: sharded parameters and, on one process, mixed precision (float32 masters, bfloat16 compute)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from archon.schema.errors import ConfigError

ReshardPolicy = Literal["default", "always", "never"]


def apply_fsdp(
    model: nn.Module,
    layers: nn.ModuleDict,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward_policy: ReshardPolicy = "default",
    *,
    expert_mesh: DeviceMesh | None = None,
    cpu_offload: bool = False,
    keep_gathered: bool = False,
) -> None:
    """Shard each block, then what is left (embedding, final norm, head) with the root.

    Parameters stay in the dtype they were built in, the masters; each block is cast to `param_dtype` when it runs,
    and gradients are accumulated and reduced in `reduce_dtype`. `default` frees a block's copy after its forward and
    keeps the root's, which the backward needs at once; `always` frees the root's too; `never` keeps all, for memory
    in place of traffic.

    Gradients are summed over `mesh`, never averaged: the loss is divided by one denominator for all ranks. Experts are
    sharded over `expert_mesh`, where they are summed over just the ranks that hold the same ones; the others' tokens
    came to them. `cpu_offload` keeps shards and gradients on the CPU. A pipeline, which runs several micro-batches
    through a stage before it goes back, keeps the gathered weights by default (`keep_gathered`).
    """
    if reshard_after_forward_policy not in ("default", "always", "never"):
        raise ConfigError(
            f"reshard_after_forward_policy must be default, always or never, got {reshard_after_forward_policy!r}"
        )
    # Activations are in param_dtype from the embedding on; casting other inputs would only narrow what was computed
    # wide on purpose (temperatures, loss weights).
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    free_root = reshard_after_forward_policy == "always"
    free_block = free_root if keep_gathered else reshard_after_forward_policy != "never"
    blocks = list(layers.values())
    for block in blocks:
        for experts in (module for module in block.modules() if getattr(module, "role", None) == "experts"):
            assert expert_mesh is not None
            place = partial(_expert_placement, ranks=expert_mesh.size(-1))
            fully_shard(
                experts, mesh=expert_mesh, reshard_after_forward=free_block, shard_placement_fn=place, **options
            )
        fully_shard(block, mesh=mesh, reshard_after_forward=free_block, **options)
    fully_shard(model, mesh=mesh, reshard_after_forward=free_root, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for block, following in pairwise(blocks):
        cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def _expert_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Shards along the experts; along their rows where there are fewer experts than ranks and the rows divide."""
    experts, rows = local_tensor(parameter).shape[:2]
    return Shard(1) if experts < ranks and rows % ranks == 0 else Shard(0)


def is_sharded(model: nn.Module) -> bool:
    """Whether `apply_fsdp` was applied to it, or to a part of it such as a pipeline's stage."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def set_gradient_reduction(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients over ranks, or leaves them to a later one; plain models have no
    choice."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


def reshard(model: nn.Module) -> None:
    """Free gathered copies that a forward without backward has left, so that parameters are the masters again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Where the part that this rank holds lies in the whole tensor, one slice a dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    here = tensor.device_mesh.get_coordinate()
    assert here is not None
    return part_of(tensor, here)


def part_of(tensor: DTensor, coordinate: Sequence[int]) -> tuple[slice, ...]:
    """`own_part` of the rank at `coordinate` of the tensor's mesh.

    FSDP shards what tensor or expert parallelism has left of a parameter, so those are the outer splits although their
    mesh dimensions come last.
    """
    bounds = [(0, size) for size in tensor.shape]
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    by_fsdp = [name in ("dp_replicate", "dp_shard_cp", "edp") for name in names]
    for dim in sorted(range(mesh.ndim), key=lambda d: by_fsdp[d]):
        placement = tensor.placements[dim]
        if placement.is_replicate():
            continue
        axis = placement.dim  # type: ignore[attr-defined]
        start, stop = bounds[axis]
        step = -(-(stop - start) // mesh.size(dim))
        first = min(start + coordinate[dim] * step, stop)
        bounds[axis] = (first, min(first + step, stop))
    return tuple(slice(*bound) for bound in bounds)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of the tensor that this rank holds; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
