"""Create gloo process groups, and end the process after their worker threads."""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path
from typing import Any

WORKER = "pt_gloo_runloop"
"""Name of the threads in which PyTorch runs the collectives of a gloo group."""
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

    See `archon.parallel.torch_private.replace_gloo_class`. The process ends after its workers.
    """
    from torch.distributed import is_gloo_available

    from archon.parallel.torch_private import replace_gloo_class

    if is_gloo_available():
        replace_gloo_class()
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
