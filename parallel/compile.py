"""torch.compile, block by block: one compilation serves all layers, so that start-up does not grow with depth."""

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
    """Returns whether blocks are compiled: `auto` compiles on a GPU only.

    On a CPU a step takes as long or longer, and the first one much longer (`python -m benchmarks.speed`, its cases
    compiled-even and compiled-ragged).
    """
    return device_type == "cuda" if choice == "auto" else choice


def apply_compile(layers: nn.ModuleDict, *, memory_budget: float | None = None, backend: str = "inductor") -> None:
    """Compile every block in place.

    Shapes are dynamic, since packed micro-batches rarely have the same token count. With `memory_budget` the
    partitioner keeps about that share of the activations and recomputes the rest.
    """
    require_private_apis("compiled blocks", SIZES)
    chosen = backend if memory_budget is None else _budgeted(backend, memory_budget)
    for block in layers.values():
        block.compile(backend=chosen, dynamic=True)
        assert block._compiled_call_impl is not None
        block._compiled_call_impl = _without_duck_shapes(block._compiled_call_impl)


def _without_duck_shapes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `compiled`, compiled without the guess that sizes which are equal in its first batch always are.

    A batch of as many tokens as the model has features, or of four documents where a head has four pairs of features,
    would otherwise make the next one compile again. Threads that share the setting, as older versions have it, may find
    it off for other code: a guess the less.
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
    """Returns the backend with its own budget; a process-wide setting would be shared by two engines."""
    require_private_apis("activation_checkpoint.mode = memory_budget", BUDGETS)
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    compile_graph = lookup_backend(backend)

    def compile_under_budget(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_graph(graph, inputs, **kwargs)

    return compile_under_budget
