"""Activation checkpointing: which results of a block's forward are kept and which the backward recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from archon.parallel.torch_parts import require_private_apis
from archon.schema.config import ActivationCheckpointConfig

PRIVATE_APIS = (
    "torch.utils.checkpoint.SAC_IGNORED_OPS",
    "torch.ops.profiler._record_function_enter_new.default",
    "torch.ops.profiler._record_function_exit._RecordFunction",
)
require_private_apis("activation checkpointing", PRIVATE_APIS)

# Costly to compute and small to keep. Batched products are left out: in a decoder they are the inside of unfused
# attention, which its backward recomputes anyway.
_SAVED_MATMULS = frozenset(
    {"aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm_v2"}
)

# Experts that FSDP shards by themselves are gathered within the block, and a recomputed block has a different number of
# FSDP's profiler marks. PyTorch counts every operator that is not listed here, and would refuse the block.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


def apply_activation_checkpointing(
    layers: Sequence[nn.Module], config: ActivationCheckpointConfig, attention_ops: frozenset[str] = frozenset()
) -> None:
    """Make the blocks of `layers` recompute as `config` says; module and parameter names stay the same.

    `full`: every block keeps only its input. `selective`: `"op"` keeps the results of matrix products and of
    `attention_ops` (`namespace::operator`) in every block; n makes every n-th block (the n-th, the 2n-th, …) keep only
    its input [Korthikanti et al. 2022, section 5, has the trade-off]. `memory_budget` is left to the compiler, see
    `apply_compile`.
    """
    if config.mode in ("none", "memory_budget"):
        return
    every = config.selective if config.mode == "selective" and isinstance(config.selective, int) else 1
    saved = _SAVED_MATMULS | attention_ops if config.mode == "selective" and config.selective == "op" else None
    for position, block in enumerate(layers, start=1):
        if position % every == 0:
            block_class: Any = type(block)
            block.__class__ = _checkpointed_class(block_class, saved)


@cache
def _checkpointed_class(block_class: Any, saved_ops: frozenset[str] | None) -> Any:
    """Returns a subclass whose forward is checkpointed and keeps the results of `saved_ops`.

    Replacing the class, as `fully_shard` does, keeps names, `isinstance` and copies of the model intact, and all
    blocks share one code object, so that torch.compile compiles it once.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no block draws random numbers
    if saved_ops is not None:

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            # By name, since attention operators exist only once their library has been imported.
            saved = op.name().partition(".")[0] in saved_ops
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(block_class.forward, self)
        return checkpoint(run, *args, **options, **kwargs)

    return type(f"Checkpointed{block_class.__name__}", (block_class,), {"forward": forward})
