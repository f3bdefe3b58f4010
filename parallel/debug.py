"""Debugging on several ranks: compare a tensor between ranks, and set collective time-outs."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.parallel.torch_private import all_groups, set_default_time_limit, set_time_limit
from archon.schema.errors import LayoutError


def check_tensor_consistency(tensor: Tensor, name: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks of a group hold bitwise equal tensors; if not, the first rank prints each rank's values.

    This is a collective. Without a process group it returns True.

    Args:
        tensor: the local tensor. For a DTensor pass `full_tensor()`: its shards differ by design.
        name: name of the tensor in the message.
        group: None for all ranks.

    Raises:
        LayoutError: the tensor is a DTensor.
    """
    if isinstance(tensor, DTensor):
        raise LayoutError(
            f"{name} is a DTensor {tensor.placements}; give {name}.full_tensor(), or its shard, {name}.to_local()"
        )
    if not dist.is_initialized():
        return True
    values = tensor.detach().to("cpu").contiguous()
    digest = hashlib.sha256(values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    local = (str(values.dtype), tuple(values.shape), digest, values.double().sum().item())
    everyone: list[tuple[str, tuple[int, ...], str, float]] = [local] * dist.get_world_size(group)
    dist.all_gather_object(everyone, local, group=group)
    if all(entry[:3] == everyone[0][:3] for entry in everyone):
        return True
    if dist.get_rank(group) == 0:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        held = [
            f"rank {rank}: {dtype} {list(shape)}, sum {total:.9g}"
            for rank, (dtype, shape, _, total) in zip(ranks, everyone, strict=True)
        ]
        print(f"{name} differs between ranks: {'; '.join(held)}", flush=True)
    return False


def patch_dist_group_timeout(timeout: timedelta) -> None:
    """Set the collective time-out of all present and future process groups.

    In a run, use `timeout_s` of the model section instead: an engine that is initialized later applies that value.
    """
    if timeout <= timedelta(0):
        raise LayoutError(f"timeout is {timeout}; expected a positive duration")
    set_default_time_limit(timeout)
    for group in all_groups() if dist.is_initialized() else ():
        set_time_limit(group, timeout)
