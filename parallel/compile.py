"""torch.compile per block: all layers share one compilation, so start-up time does not grow with depth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from archon.parallel.torch_parts import require_private_apis

SIZES = ("torch.fx.experimental._config.use_duck_shape", "torch.nn.Module._compiled_call_impl")
BUDGETS = (
    "torch._dynamo.backends.registry.lookup_backend",
    "torch._functorch.config.activation_memory_budget",
    "torch._functorch.config.patch",
)
PRIVATE_APIS = SIZES + BUDGETS

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
    require_private_apis("compiled blocks", SIZES)
    chosen = backend if memory_budget is None else _budgeted(backend, memory_budget)
    for block in layers.values():
        block.compile(backend=chosen, dynamic=True)
        assert block._compiled_call_impl is not None
        block._compiled_call_impl = _without_duck_shapes(block._compiled_call_impl)


def _without_duck_shapes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled block so that it compiles with duck shapes off.

    With duck shapes, torch.compile assumes that sizes which are equal in the first batch are always equal. A first
    batch with as many tokens as the model has features would then force a second compilation. In older versions of
    torch the setting is global, so other threads may compile without this specialization; that is harmless.
    """
    from torch.fx.experimental import _config as shapes

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, shapes.use_duck_shape = shapes.use_duck_shape, False
        try:
            return compiled(*args, **kwargs)
        finally:
            shapes.use_duck_shape = before

    return call


def _budgeted(backend: str, budget: float) -> Callable[..., Any]:
    """Return the backend with a budget of its own: a global setting would leak into a second engine."""
    require_private_apis("activation_checkpoint.mode = memory_budget", BUDGETS)
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    compile_graph = lookup_backend(backend)

    def compile_under_budget(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_graph(graph, inputs, **kwargs)

    return compile_under_budget
