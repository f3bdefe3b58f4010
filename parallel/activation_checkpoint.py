"""Activation checkpointing: choose the forward results to keep and those to recompute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from archon.parallel.activation_offload import InputOffload, offloading_class
from archon.parallel.torch_private import ignore_profiler_marks, replace_class
from archon.schema.config import ActivationCheckpointConfig
from archon.schema.errors import ConfigError

ignore_profiler_marks()

# Matmuls that are expensive to recompute and small to keep. Batched matmuls are not listed: in a decoder they belong to
# unfused attention, and the attention backward recomputes them anyway.
SAVED_MATMULS = frozenset(
    {"aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm", "aten::_scaled_grouped_mm"}
)


def apply_activation_checkpointing(
    layers: Sequence[nn.Module], config: ActivationCheckpointConfig, attention_ops: frozenset[str] = frozenset()
) -> None:
    """Apply activation checkpointing to the blocks; module and parameter names stay the same.

    - `full`: every block keeps only its input.
    - `offload`: as `full`, with the inputs in host memory, see `archon.parallel.activation_offload`.
    - `selective` with `"op"`: every block keeps the results of matmuls and of `attention_ops`.
    - `selective` with an integer n: every n-th block keeps only its input (Korthikanti et al. 2022, section 5); with
      `"first n"`, each of the first n blocks.
    - `memory_budget`: nothing here; the compiler decides, see `apply_compile`.

    Args:
        layers: the blocks in order.
        config: the recompute policy.
        attention_ops: attention operators as `namespace::operator`.

    Raises:
        ConfigError: the policy is `auto`, which `archon.engine.memory.recompute` must resolve first.
    """
    if config.mode == "auto":
        raise ConfigError("activation_checkpoint.mode is auto, which only the engine resolves; choose another mode")
    saved = SAVED_MATMULS | attention_ops if config.saves_ops else None
    input_offload = InputOffload()
    for position, block in enumerate(layers, start=1):
        if not config.recomputes(position):
            continue
        block_class: Any = type(block)
        block_class = _checkpointed_class(block_class, saved)
        if config.mode == "offload":
            block_class = offloading_class(block_class)
            vars(block).update(input_offload=input_offload, is_first_offloaded=position == 1)
        replace_class(block, block_class)


@cache
def _checkpointed_class(block_class: Any, saved_ops: frozenset[str] | None) -> Any:
    """Return a subclass with a checkpointed forward that keeps the results of `saved_ops`.

    `fully_shard` replaces the class in the same way. Names, `isinstance` and deep copies keep working, and all blocks
    share one code object, so torch.compile compiles it once.
    """
    # Blocks must not draw random numbers: recomputation would draw others.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if saved_ops is not None:
        names = tuple(sorted(saved_ops))
        context_fn: Any = partial(create_selective_checkpoint_contexts, partial(_save_listed, names))
        # PyTorch's cache of compiled blocks skips a block whose policy it cannot identify.
        context_fn.cache_hash = " ".join(names)
        options["context_fn"] = context_fn

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(block_class.forward, self)
        return checkpoint(run, *args, **options, **kwargs)

    return type(f"Checkpointed{block_class.__name__}", (block_class,), {"forward": forward})


# A function of the module, because PyTorch pickles the policy for the key of its cache.
def _save_listed(saved_ops: tuple[str, ...], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Compare names: attention operators exist only after their library is imported.
    saved = op.name().partition(".")[0] in saved_ops
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
