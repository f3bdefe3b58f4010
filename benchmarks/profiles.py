"""Breakdown of a step's time by kind of operator, recorded if a side misses its aim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
