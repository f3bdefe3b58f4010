"""Breakdown of a step's time: by kind of operator on a CPU, by class of kernel on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

STEP = "benchmark:step"
OTHER, OUTSIDE = "other operators", "outside operators"
# The first kind with a part in an operator's name has it.
KINDS: dict[str, tuple[str, ...]] = {
    "collectives": ("archon:", "c10d", "fsdp::", "FSDP::", "record_param_comms"),
    "fused attention": ("scaled_dot_product", "flash_attention"),
    "softmax and loss": ("softmax", "logsumexp", "nll_loss"),
    "optimizer and clipping": ("adam", "_foreach_", "vector_norm"),
    "matrix products": ("aten::mm", "addmm", "bmm", "mkldnn::_linear"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone", "aten::fill_", "split_with_sizes"),
}

# The same for kernels of a GPU, in lower case. Inductor names its kernels triton_…
KERNELS: dict[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "attn", "attention"),
    "GEMM": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "optimizer": ("adam",),
    "copies": ("memcpy", "memset"),
    "index": ("index", "scatter", "gather", "catarray", "sort", "scan"),
    "Triton": ("triton",),
    "reduce": ("reduce", "norm"),
    "elementwise": ("elementwise", "vectorized"),
}
OWN_KERNELS, OTHER_KERNELS, IDLE = "archon's kernels", "other kernels", "idle"


class Kernel(NamedTuple):
    """A device event: start and end in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """Return the kind of the profiler event `name`; "outside" for anything but an operator."""
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return OTHER if "::" in name and not name.startswith("autograd::") else OUTSIDE


def operator_seconds(step: Callable[[], Any]) -> dict[str, float]:
    """Measure seconds of one call of `step` on a CPU by kind; they sum to the profiled duration.

    Only the training thread counts: a collective costs the time of its start and its wait. Time between operators
    (Python, autograd) is `outside operators`.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    from archon.tools.bench.profiling import label_waits

    with profile(activities=[ProfilerActivity.CPU]) as profiler, label_waits(), record_function(STEP):
        step()
    events = profiler.events()
    thread = next(event.thread for event in events if event.name == STEP)
    seconds: dict[str, float] = {}
    for event in events:
        if event.thread == thread:
            kind = kind_of(event.name)
            seconds[kind] = seconds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    return seconds


@cache
def own_kernels() -> frozenset[str]:
    """Return the names of the Triton kernels in `models/cuda`."""
    folder = Path(__file__).resolve().parents[1] / "models" / "cuda"
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return frozenset(name for text in texts for name in re.findall(r"@triton\.jit\s+def (\w+)", text))


def kernel_class(name: str) -> str:
    """Return the class of a device event."""
    if name in own_kernels():
        return OWN_KERNELS
    lower = name.lower()
    return next((kind for kind, parts in KERNELS.items() if any(part in lower for part in parts)), OTHER_KERNELS)


def seconds_by_class(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return seconds by class; `IDLE` is the time between the first start and the last end without any kernel."""
    seconds: dict[str, float] = {}
    idle, end = 0.0, None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        kind = kernel_class(kernel.name)
        seconds[kind] = seconds.get(kind, 0.0) + (kernel.end - kernel.start) / 1e6
        if end is not None:
            idle += max(0.0, kernel.start - end)
        end = kernel.end if end is None else max(end, kernel.end)
    return seconds | {IDLE: idle / 1e6}


def step_profile(step: Callable[[], Any], device: str) -> dict[str, float]:
    """Measure seconds of one call of `step` by kind of operator on a CPU, or by class of kernel on a GPU."""
    if device == "cpu":
        return operator_seconds(step)
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = (event for event in profiler.events() if event.device_type == cuda and not event.is_user_annotation)
    return seconds_by_class(Kernel(event.name, event.time_range.start, event.time_range.end) for event in events)
