"""FSDP2: sharded parameters, with gradients that are sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from archon.parallel.dims import ArchonParallelDims
from archon.parallel.torch_private import keep_input_dtypes, reduction_dtype
from archon.schema.errors import ConfigError, FamilyError

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
    vision_encoder: nn.Module | None = None,
    mtp_layers: nn.ModuleDict | None = None,
) -> None:
    """Shard each block, the vision encoder as one unit, and the remaining modules with the root.

    Master weights keep the dtype of the built parameters. Each block is cast to `param_dtype` when it runs; gradients
    are accumulated and reduced in `reduce_dtype`, and `sum_gradients` makes the reduction a sum. A module with
    `full_precision` computes in the dtype of its parameters.

    Args:
        model: the decoder; its embedding, final norm and head are sharded with the root.
        layers: the blocks in order.
        mesh: mesh of dense parameters.
        param_dtype: compute dtype.
        reduce_dtype: dtype of gradient accumulation and reduction.
        reshard_after_forward_policy: `default` frees the gathered weights of a block after its forward and keeps those
            of the root, which the backward needs first; `always` frees the root's too; `never` keeps all, for more
            memory and less traffic.
        expert_mesh: mesh of expert parameters: the ranks that hold the same experts.
        cpu_offload: keep shards and gradients on the CPU.
        keep_gathered: keep gathered weights by default, for a pipeline stage that runs several micro-batches before the
            first backward.
        vision_encoder: the vision encoder, if the model has one.
        mtp_layers: the layers of multi-token prediction, if the model has any. Not all forwards run them, so no block
            prefetches them.
    """
    check_reshard_policy(reshard_after_forward_policy)
    # Activations have param_dtype from the embedding on. Other inputs (temperatures, loss weights) stay wide on
    # purpose.
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    free_root = reshard_after_forward_policy == "always"
    free_block = free_root if keep_gathered else reshard_after_forward_policy != "never"
    blocks = list(layers.values())
    one_process = dist.get_world_size() == 1
    if one_process:
        # One process gathers nothing, so a block is one unit: hooks of modules inside it would interrupt compiled code.
        # Parameters with full precision are never cast.
        wide = (module for module in model.modules() if getattr(module, "full_precision", False))
        options["ignored_params"] = {parameter for module in wide for parameter in module.parameters()}
    for block in (*blocks, *(mtp_layers or {}).values()):
        if not one_process:
            _shard_inside(block, mesh, expert_mesh, free_block, options)
        fully_shard(block, mesh=mesh, reshard_after_forward=free_block, **options)
    if vision_encoder is not None:
        fully_shard(vision_encoder, mesh=mesh, reshard_after_forward=free_block, **options)
    fully_shard(model, mesh=mesh, reshard_after_forward=free_root, **options)
    for block, following in pairwise(blocks):
        cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def check_reshard_policy(policy: str) -> None:
    """Raise ConfigError for an unknown policy; see `apply_fsdp`."""
    if policy not in ("default", "always", "never"):
        raise ConfigError(f"reshard_after_forward_policy must be default, always or never, got {policy!r}")


def _shard_inside(
    block: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, free_block: bool, options: dict[str, Any]
) -> None:
    """Shard the modules of a block that differ from it in mesh or dtype; arguments as in `apply_fsdp`."""
    for experts in (module for module in block.modules() if getattr(module, "role", None) == "experts"):
        assert expert_mesh is not None
        place = partial(_expert_placement, ranks=expert_mesh.size(-1))
        fully_shard(experts, mesh=expert_mesh, reshard_after_forward=free_block, shard_placement_fn=place, **options)
    for module in (module for module in block.modules() if getattr(module, "full_precision", False)):
        # A separate FSDP group: a group has one dtype.
        policy = replace(options["mp_policy"], param_dtype=None)
        fully_shard(module, mesh=mesh, reshard_after_forward=free_block, **options | {"mp_policy": policy})


def sum_gradients(
    model: nn.Module, dims: ArchonParallelDims, param_dtype: torch.dtype, reduce_dtype: torch.dtype, function: str
) -> None:
    """Make FSDP sum gradients, never average them, after any function has parallelized the model.

    The loss is divided by one denominator for all ranks, so an average would divide twice. FSDP also stops casting the
    inputs of modules, such as loss weights, to the compute dtype.

    Args:
        model: the parallelized model or pipeline stage.
        dims: degrees and meshes of the layout.
        param_dtype: compute dtype.
        reduce_dtype: dtype in which gradients are reduced.
        function: name of the family's parallelize function, for error messages.

    Raises:
        FamilyError: the function leaves out tensor parallelism, narrows a module with `full_precision`, reduces
            gradients in a narrower dtype, or does not reduce the gradient of a parameter over all ranks of the stage.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if (dtype := reduction_dtype(module) or reduce_dtype).itemsize < reduce_dtype.itemsize:
                raise FamilyError(
                    f"{function} reduces the gradients of {type(module).__name__} in {dtype}; pass reduce_dtype to the "
                    f"MixedPrecisionPolicy, {reduce_dtype} here"
                )
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            keep_input_dtypes(module)
            continue
        is_wide = getattr(module, "full_precision", False) and isinstance(model, FSDPModule)
        sharded = (parameter for parameter in module.parameters() if isinstance(parameter, DTensor))
        if is_wide and any(parameter.dtype != param_dtype for parameter in sharded):
            raise FamilyError(
                f"{function} computes {type(module).__name__} in {param_dtype}; shard modules with full_precision "
                "alone, by fully_shard without a param_dtype"
            )
    if dims.tp_enabled and any(module.tp is None for module in model.modules() if hasattr(module, "tp")):
        raise FamilyError(
            f"{function} applies no tensor parallelism, and the layout has tp = {dims.tp}; call "
            "archon.parallel.tensor.apply_tensor_parallel(model, parallel_dims.get_mesh('tp'), plan), or leave t out"
        )
    ranks = dims.world_size // dims.pp
    for name, parameter in model.named_parameters():
        reduced = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        if reduced != ranks:
            raise FamilyError(
                f"{function} reduces the gradient of {name} over {reduced} of {ranks} ranks; give every layer a role "
                "of the tensor-parallel plan, and call fully_shard with mesh = parallel_dims.fsdp_mesh (experts: "
                "expert_fsdp_mesh) for the model and its blocks"
            )


def _expert_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Shard the expert dimension, or rows if there are fewer experts than ranks and the rows divide evenly."""
    experts, rows = local_tensor(parameter).shape[:2]
    return Shard(1) if experts < ranks and rows % ranks == 0 else Shard(0)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `apply_fsdp` was applied to the model or to a part such as a pipeline stage."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def set_gradient_reduction(model: nn.Module, enabled: bool) -> None:
    """Set whether the next backward reduces gradients over ranks. No effect without FSDP."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


def reshard(model: nn.Module) -> None:
    """Free gathered weights after a forward without backward; the parameters are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_region(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slice of each dimension of the full tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return shard_region(tensor, coordinate)


def computed_region(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slice of each dimension that this rank computes with: `local_region` once FSDP has gathered it."""
    if not isinstance(tensor, DTensor):
        return local_region(tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return shard_region(tensor, coordinate, gathered=True)


def shard_region(tensor: DTensor, coordinate: Sequence[int], *, gathered: bool = False) -> tuple[slice, ...]:
    """Return `local_region` of the rank at `coordinate` of the mesh.

    FSDP shards the shards of tensor and expert parallelism, so those are the outer splits although their mesh
    dimensions come last. `gathered` leaves out the splits of FSDP.
    """
    bounds = [(0, size) for size in tensor.shape]
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    by_fsdp = [name in ("dp_replicate", "dp_shard_cp", "edp") for name in names]
    for dim in sorted(range(mesh.ndim), key=lambda d: by_fsdp[d]):
        placement = tensor.placements[dim]
        if placement.is_replicate() or (gathered and by_fsdp[dim]):
            continue
        axis = placement.dim  # type: ignore[attr-defined]
        start, stop = bounds[axis]
        step = -(-(stop - start) // mesh.size(dim))
        first = min(start + coordinate[dim] * step, stop)
        bounds[axis] = (first, min(first + step, stop))
    return tuple(slice(*bound) for bound in bounds)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; a plain tensor is returned as is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
