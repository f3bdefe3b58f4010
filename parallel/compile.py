"""torch.compile per block: all layers share one compilation, so start-up time does not grow with depth."""

from __future__ import annotations

from typing import Literal

from torch import nn

from archon.parallel.torch_private import backend_with_memory_budget, compile_without_duck_shapes

CompileChoice = bool | Literal["auto"]


def compile_enabled(choice: CompileChoice, device_type: str) -> bool:
    """Return whether blocks are compiled: `auto` compiles on a GPU only.

    On a CPU, compiled steps are no faster, and the first step is much slower (cases compiled-even and compiled-ragged
    of `python -m benchmarks.speed`).
    """
    return device_type == "cuda" if choice == "auto" else choice


def apply_compile(layers: nn.ModuleDict, *, memory_budget: float | None = None, backend: str = "inductor") -> None:
    """Compile every block in place, with dynamic shapes: packed micro-batches rarely have the same token count.

    Args:
        layers: the blocks.
        memory_budget: fraction of the activations that the partitioner keeps; it recomputes the others. None keeps all.
        backend: a torch.compile backend.
    """
    chosen = backend if memory_budget is None else backend_with_memory_budget(backend, memory_budget)
    for block in layers.values():
        compile_without_duck_shapes(block, chosen)
