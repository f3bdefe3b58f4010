"""Join the process group of torchrun: time limits, and one GPU per process."""

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
from archon.parallel.torch_private import all_groups, set_time_limit
from archon.schema.errors import LayoutError


def torchrun_world_size() -> int:
    """Return the number of processes that torchrun started; 1 without torchrun.

    Raises:
        LayoutError: WORLD_SIZE is not a number.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if not world_size.isdecimal():
        raise LayoutError(f"the environment has WORLD_SIZE={world_size!r}, expected a number: leave it to torchrun")
    return int(world_size)


def require_processes(world_size: int) -> None:
    """Raise LayoutError unless the number of running processes matches the layout."""
    running = dist.get_world_size() if dist.is_initialized() else torchrun_world_size()
    if running != world_size:
        raise LayoutError(
            f"the layout needs {world_size} processes, but {running} are running; "
            f"start it with torchrun --nproc-per-node {world_size} -m archon …, or set a layout of {running}, such as "
            f"d{running}, for every model of the run"
        )


def join_process_group(world_size: int, device_type: str, timeout_s: float) -> None:
    """Join the process group of torchrun, and exit the process if another rank fails.

    Raises:
        LayoutError: the group has another size or does not exist, or the other processes do not join in time.
    """
    require_processes(world_size)
    if world_size == 1 or dist.is_initialized():
        return
    rank = os.environ.get("RANK", "")
    logging.basicConfig(format=f"archon: rank {rank}: %(message)s", level=logging.WARNING)
    limit, options = timedelta(seconds=timeout_s), dict[str, Any]()
    try:
        if (store := join_rendezvous(int(rank or 0), world_size, limit)) is not None:
            options = {"store": store, "rank": int(rank), "world_size": world_size}
        failure = FailureMonitor.connect(timeout_s)
        if failure is not None:
            failure.watch()
            atexit.register(failure.mark_done)
        init_process_group(device_type, timeout=limit, **options)
    except (ValueError, dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).splitlines()[0][:200]
        raise LayoutError(
            f"process {rank or '?'} of {world_size} cannot join the others within {timeout_s:g} s ({reason}); start "
            "all of them with torchrun"
        ) from error


def limit_collectives(timeout_s: float) -> None:
    """Set the time limit of all collectives, except in groups of `ControlPlane.with_long_timeout`.

    Groups of a mesh do not inherit the limit of the default group.
    """
    for group in all_groups():
        if not group.group_desc.startswith(LONG_TIMEOUT_PREFIX):
            set_time_limit(group, timedelta(seconds=timeout_s))


def assign_gpu() -> torch.device:
    """Return the GPU of this process: LOCAL_RANK under torchrun, else the current one.

    Raises:
        LayoutError: there are fewer GPUs than processes.
    """
    local = os.environ.get("LOCAL_RANK")
    if local is not None and torchrun_world_size() > 1:
        if int(local) >= torch.cuda.device_count():
            raise LayoutError(
                f"process {local} of this machine has no GPU: PyTorch sees {torch.cuda.device_count()}; start at most "
                "as many processes a machine (--nproc-per-node), or set device to cpu"
            )
        torch.cuda.set_device(int(local))
    return torch.device("cuda", torch.cuda.current_device())
