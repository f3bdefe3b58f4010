"""How archon's gloo process groups are made: one worker thread each, and one device for all of a process."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from archon.parallel.torch_parts import require_parts

WORKER = "pt_gloo_runloop"
"""What PyTorch names the threads that run a gloo group's collectives."""
PARTS = tuple(
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
SETTLED = 3
POLL_SECONDS = 0.01


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
    require_parts("gloo groups", PARTS)
    gloo: Any = distributed_c10d.ProcessGroupGloo

    @cache
    def devices() -> list[Any]:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if interfaces:
            return [gloo.create_device(interface=name) for name in interfaces.split(",")]
        return [gloo.create_default_device()]

    class IsGloo(type(gloo)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            # PyTorch hands out the base class for a group whose Python object has gone, and asks for its kind.
            return isinstance(instance, gloo)

    class SingleWorkerGloo(gloo, metaclass=IsGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = devices(), 1, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SingleWorkerGloo  # type: ignore[misc]
    atexit.register(let_workers_finish)


def let_workers_finish(limit_s: float = 5.0) -> None:
    """Wait until no worker of a gloo group is at work any more, at most `limit_s` seconds.

    A collective is over for its caller before the worker has dropped the tensors, for which it needs the interpreter's
    lock. Where the interpreter is ending by then, taking the lock in a destructor aborts the process: "terminate called
    without an active exception" (PyTorch's issue 190489).
    """
    deadline, settled = time.monotonic() + limit_s, 0
    while settled < SETTLED and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)  # without the lock
        settled = 0 if _a_worker_runs() else settled + 1


def _a_worker_runs() -> bool:
    """Whether a worker thread has the processor or waits for it; where the system does not tell, none does."""
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has just ended
            continue
        if name == WORKER and rest.split()[0] != "S":
            return True
    return False
