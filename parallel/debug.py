"""Help with wrong results and hangs on several ranks: do all hold the same tensor, and how long may they wait."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.parallel.torch_groups import all_groups, set_default_time_limit, set_time_limit
from archon.schema.errors import LayoutError


def check_tensor_consistency(tensor: Tensor, name: str, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether all ranks of a group hold the same tensor, bit for bit; else its first rank prints what each has.

    Every rank of the group must call it. Without a process group there is nothing to differ from.

    Args:
        tensor: this rank's. Of a sharded one the shards differ as they should: give its `full_tensor()`.
        name: for the message.
        group: None for all ranks.

    Raises LayoutError for a sharded tensor.
    """
    if isinstance(tensor, DTensor):
        raise LayoutError(
            f"{name} is a DTensor {tensor.placements}; give {name}.full_tensor(), or its shard, {name}.to_local()"
        )
    if not dist.is_initialized():
        return True
    values = tensor.detach().to("cpu").contiguous()
    digest = hashlib.sha256(values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    own = (str(values.dtype), tuple(values.shape), digest, values.double().sum().item())
    everyone: list[tuple[str, tuple[int, ...], str, float]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    if all(other[:3] == everyone[0][:3] for other in everyone):
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
    """Sets how long collectives of all process groups wait for a rank, of those that are made later too.

    For a run, `timeout_s` of the model's section says it; an engine that is initialized later sets its groups to that.
    """
    if timeout <= timedelta(0):
        raise LayoutError(f"timeout is {timeout}; expected more than none")
    set_default_time_limit(timeout)
    for group in all_groups() if dist.is_initialized() else ():
        set_time_limit(group, timeout)
