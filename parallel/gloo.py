"""How archon's gloo process groups are made: one worker thread each, and one device for all of a process."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any


@cache
def use_single_worker_gloo() -> None:
    """From now on PyTorch makes the gloo groups of this process so; call it before they are made.

    By default a group has two worker threads, and each, when it has run a collective, assigns the same `std::string` of
    the group without a lock (`lastCompletedWorkName` in `ProcessGroupGloo::runLoop`, as of PyTorch 2.13). When both do
    so at once the heap is corrupted: some ten thousand collectives later a run crashes or hangs. One worker cannot race
    with itself; the collectives of one group then run one after the other, as NCCL's do.

    By default, too, each group has a device of its own, with a thread that wakes a hundred times a second, and a layout
    has about twenty groups. They share one here.
    """
    from torch.distributed import distributed_c10d, is_gloo_available

    if not is_gloo_available():
        return
    gloo: Any = distributed_c10d.ProcessGroupGloo

    @cache
    def devices() -> list[Any]:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if interfaces:
            return [gloo.create_device(interface=name) for name in interfaces.split(",")]
        return [gloo.create_default_device()]

    class SingleWorkerGloo(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = devices(), 1, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SingleWorkerGloo  # type: ignore[misc]
