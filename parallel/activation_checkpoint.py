"""Activation checkpointing: which results of a block's forward are kept and which are computed again in the
backward."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from archon.parallel.torch_recompute import ignore_profiler_marks
from archon.schema.config import ActivationCheckpointConfig

# Costly to compute and small to keep, compared with what lies between them. Batched products are left out: in a decoder
# they are the inside of attention written out, which its backward makes again anyway.
_SAVED_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_grouped_mm"})

ignore_profiler_marks()


def apply_activation_checkpointing(
    layers: nn.ModuleDict, config: ActivationCheckpointConfig, attention_ops: frozenset[str] = frozenset()
) -> None:
    """Make the blocks of `layers` recompute as `config` says; module and parameter names stay as they are.

    `full`: every block keeps its input only. `selective`: `"op"` keeps the results of matrix products and of
    `attention_ops` (`namespace::operator`) in every block, n makes every n-th block (the n-th, the 2n-th, …) keep its
    input only [Korthikanti et al. 2022, section 5 has the trade-off]. `memory_budget` is the compiler's work, see
    `apply_compile`.
    """
    if config.mode in ("none", "memory_budget"):
        return
    every = config.selective if config.mode == "selective" and isinstance(config.selective, int) else 1
    saved = _SAVED_PRODUCTS | attention_ops if config.mode == "selective" and config.selective == "op" else None
    for position, block in enumerate(layers.values(), start=1):
        if position % every == 0:
            block_class: Any = type(block)
            block.__class__ = _checkpointed_class(block_class, saved)


@cache
def _checkpointed_class(block_class: Any, saved_ops: frozenset[str] | None) -> Any:
    """The same block whose forward is checkpointed, with the results of `saved_ops` kept.

    Exchanging the class, as `fully_shard` does, keeps names, `isinstance` and copies of the model intact, and all
    blocks share one code object, so torch.compile compiles it once.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no block draws random numbers
    if saved_ops is not None:

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            # By name, since attention operators exist only once their library has been imported.
            saved = op.name().partition(".")[0] in saved_ops
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        def contexts() -> Any:
            return create_selective_checkpoint_contexts(policy)

        options["context_fn"] = contexts

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(block_class.forward, self)
        return checkpoint(run, *args, **options, **kwargs)

    return type(f"Checkpointed{block_class.__name__}", (block_class,), {"forward": forward})
