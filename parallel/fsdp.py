"""FSDP2: sharded parameters and, on one process, mixed precision (float32 masters, bfloat16 compute)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from archon.schema.errors import ConfigError

ReshardPolicy = Literal["default", "always", "never"]


def apply_fsdp(
    model: nn.Module,
    layers: nn.ModuleDict,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward_policy: ReshardPolicy = "default",
) -> None:
    """Shard each block, then what is left (embedding, final norm, head) with the root.

    Parameters stay in the dtype they were built in, the masters; each block is cast to `param_dtype` when it runs,
    and gradients are accumulated and reduced in `reduce_dtype`. `default` frees a block's copy after its forward and
    keeps the root's, which the backward needs at once; `always` frees the root's too; `never` keeps all, for memory
    in place of traffic.
    """
    if reshard_after_forward_policy not in ("default", "always", "never"):
        raise ConfigError(
            f"reshard_after_forward_policy must be default, always or never, got {reshard_after_forward_policy!r}"
        )
    # Activations are in param_dtype from the embedding on; casting other inputs would only narrow what was computed
    # wide on purpose (temperatures, loss weights).
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in layers.values():
        fully_shard(
            block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward_policy != "never"
        )
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward_policy == "always")


def is_sharded(model: nn.Module) -> bool:
    """Whether `apply_fsdp` was applied."""
    return isinstance(model, FSDPModule)


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


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from its shards where it is sharded; without a copy where this rank holds it all."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of the tensor that this rank holds; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
