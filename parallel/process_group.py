"""The process group that torchrun prepares: joined, limited in time, and one GPU for each process."""

from __future__ import annotations

import atexit
import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from archon.parallel.control_plane import LONG_TIMEOUT_PREFIX
from archon.parallel.failure import FailureMonitor
from archon.parallel.gloo import init_process_group
from archon.parallel.rendezvous import join_rendezvous
from archon.parallel.torch_groups import all_groups, set_time_limit
from archon.schema.errors import LayoutError


def torchrun_world_size() -> int:
    """Returns the number of processes that torchrun has started; 1 without it. Raises LayoutError where WORLD_SIZE is
    not a number."""
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal():
        raise LayoutError(f"the environment has WORLD_SIZE={given!r}, expected a number: leave it to torchrun")
    return int(given)


def require_processes(world_size: int) -> None:
    """Raises LayoutError unless as many processes run as the layout needs."""
    running = dist.get_world_size() if dist.is_initialized() else torchrun_world_size()
    if running != world_size:
        raise LayoutError(
            f"the layout needs {world_size} processes, but {running} are running; "
            f"start it with torchrun --nproc-per-node {world_size} -m archon …, or set a layout of {running}, such as "
            f"d{running}, for every model of the run"
        )


def join_process_group(world_size: int, device_type: str, timeout_s: float) -> None:
    """Join the process group that torchrun has prepared, and exit when one of its ranks fails. Raises LayoutError for
    a group of another size or none, and where the other processes do not join in time."""
    require_processes(world_size)
    if world_size == 1 or dist.is_initialized():
        return
    rank = os.environ.get("RANK", "")
    logging.basicConfig(format=f"archon: rank {rank}: %(message)s", level=logging.WARNING)
    limit, own = timedelta(seconds=timeout_s), dict[str, Any]()
    try:
        if (store := join_rendezvous(int(rank or 0), world_size, limit)) is not None:
            own = {"store": store, "rank": int(rank), "world_size": world_size}
        failure = FailureMonitor.connect()
        if failure is not None:
            failure.watch()
            atexit.register(failure.mark_done)
        init_process_group(device_type, timeout=limit, **own)
    except (ValueError, dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).splitlines()[0][:200]
        raise LayoutError(
            f"process {rank or '?'} of {world_size} cannot join the others within {timeout_s:g} s ({reason}); start "
            "all of them with torchrun"
        ) from error


def limit_collectives(timeout_s: float) -> None:
    """Set the time limit of every group's collectives, except of those that wait for files and rollouts
    (`ControlPlane.with_long_timeout`): a group that a mesh has made does not inherit the default group's limit."""
    for group in all_groups():
        if not group.group_desc.startswith(LONG_TIMEOUT_PREFIX):
            set_time_limit(group, timedelta(seconds=timeout_s))


def assign_gpu() -> torch.device:
    """Returns the GPU of this process: that of torchrun's LOCAL_RANK, else the current one. Raises LayoutError where
    there are fewer GPUs than processes."""
    local = os.environ.get("LOCAL_RANK")
    if local is not None and torchrun_world_size() > 1:
        if int(local) >= torch.cuda.device_count():
            raise LayoutError(
                f"process {local} of this machine has no GPU: PyTorch sees {torch.cuda.device_count()}; start at most "
                "as many processes a machine (--nproc-per-node), or set device to cpu"
            )
        torch.cuda.set_device(int(local))
    return torch.device("cuda", torch.cuda.current_device())
