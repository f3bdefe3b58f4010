"""Profile of one training step by torch's profiler, with the labels of `archon.tools.bench.partition`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from archon.models.layers.head import LMHead
from archon.parallel.phase import phase_listener
from archon.parallel.torch_private import wrap_waits
from archon.schema.private_directory import PrivateDirectory
from archon.tools.bench.partition import LABEL, STEP, Profile, read_profile

# Kinds of collectives by c10d's `OpType`, the only information of a wait.
_KIND_OF_OP_TYPE = {
    0: "broadcast",
    1: "all_reduce",
    4: "all_gather",
    5: "all_gather",
    9: "reduce_scatter",
    10: "all_to_all",
    11: "all_to_all",
    12: "send",
    13: "recv",
    16: "reduce_scatter",
    17: "send_recv",
}


def phase_label(name: str) -> record_function:
    """Return a context that labels a phase in the trace."""
    return record_function(LABEL + name)


def profile_step(step: Callable[[], Any], model: nn.Module, device: torch.device) -> tuple[Profile, float]:
    """Return the profile and the wall-clock seconds of one call of `step`, which must wait for the device."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler, phase_listener(phase_label), _label_head(model), label_waits():
        start = time.perf_counter()
        with phase_label(STEP):
            step()
        seconds = time.perf_counter() - start
    with PrivateDirectory("archon-trace-") as folder:
        path = folder.path / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return read_profile(trace, on_gpu), seconds


@contextmanager
def _label_head(model: nn.Module) -> Iterator[None]:
    """Label the head's forward, which also computes the gradient of a fused loss."""
    opened: list[Any] = []

    def before(*_: Any) -> None:
        opened.append(phase_label("head"))
        opened[-1].__enter__()

    def after(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, LMHead):
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def label_waits() -> AbstractContextManager[None]:
    """Label Python waits for collectives; the profiler records no operator for them."""
    return wrap_waits(lambda kind: phase_label(_KIND_OF_OP_TYPE.get(kind, "collective")))
