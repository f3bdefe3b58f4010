"""Gloo process groups with one worker thread each and one shared device per process."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from archon.parallel.torch_parts import require_private_apis

WORKER = "pt_gloo_runloop"
"""Name of the threads in which PyTorch runs the collectives of a gloo group."""
PRIVATE_APIS = tuple(
    f"torch.distributed.distributed_c10d.ProcessGroupGloo.{part}"
    for part in (
        "create_device",
        "create_default_device",
        "_Options._devices",
        "_Options._threads",
        "_Options._timeout",
        "_set_default_timeout",
        "options",
    )
)
IDLE_POLLS = 3
POLL_SECONDS = 0.01


def init_process_group(device_type: str, **options: Any) -> None:
    """`torch.distributed.init_process_group` with NCCL for a GPU's tensors and gloo for the CPU's."""
    from torch.distributed import init_process_group

    use_single_worker_gloo()
    init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", **options)


@cache
def use_single_worker_gloo() -> None:
    """Make PyTorch create gloo groups with one worker thread and a shared device. Call it before creating groups.

    By default a group has two worker threads, and each assigns the same `std::string` of the group without a lock after
    a collective (`lastCompletedWorkName` in `ProcessGroupGloo::runLoop`, as of PyTorch 2.13). When both do so at once
    the heap is corrupted, and a run crashes or hangs after some ten thousand collectives. With one worker the
    collectives of one group run one after the other, as NCCL's do.

    Also by default, each group has its own device, with a thread that wakes a hundred times a second, and a layout has
    about twenty groups.
    """
    from torch.distributed import distributed_c10d, is_gloo_available

    if not is_gloo_available():
        return
    require_private_apis("gloo groups", PRIVATE_APIS)
    gloo: Any = distributed_c10d.ProcessGroupGloo

    @cache
    def devices() -> list[Any]:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if interfaces:
            return [gloo.create_device(interface=name) for name in interfaces.split(",")]
        return [gloo.create_default_device()]

    class GlooMeta(type(gloo)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            # PyTorch returns the base class for a group without a live Python object, and checks its type.
            return isinstance(instance, gloo)

    class SingleWorkerGloo(gloo, metaclass=GlooMeta):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **further: Any) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = devices(), 1, timeout
            for name, value in further.items():  # of PyTorch 2.14: enable_reconfigure
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SingleWorkerGloo  # type: ignore[misc]
    atexit.register(wait_for_idle_workers)


def wait_for_idle_workers(limit_s: float = 5.0) -> None:
    """Wait until the workers of all gloo groups are idle, at most `limit_s` seconds.

    A collective returns to its caller before the worker has released the tensors, for which it needs the GIL. If the
    interpreter is shutting down by then, taking the GIL in a destructor aborts the process: "terminate called without
    an active exception" (PyTorch issue 190489).
    """
    deadline, idle_polls = time.monotonic() + limit_s, 0
    while idle_polls < IDLE_POLLS and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)  # releases the GIL
        idle_polls = 0 if _is_worker_busy() else idle_polls + 1


def _is_worker_busy() -> bool:
    """Return whether a worker thread is running or runnable; False on a system without /proc."""
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has just ended
            continue
        if name == WORKER and rest.split()[0] != "S":
            return True
    return False
