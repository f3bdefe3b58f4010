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

# Costly to compute and small to keep, compared with what lies between them. Attention has one operator a backend.
# Batched products are left out: in a decoder they are the inside of attention written out, which its backward makes
# again anyway.
_KEPT_OPS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "archon::packed_sdpa",
    }
)

ignore_profiler_marks()


def apply_activation_checkpointing(layers: nn.ModuleDict, config: ActivationCheckpointConfig) -> None:
    """Make the blocks of `layers` recompute as `config` says; module and parameter names stay as they are.

    `full`: every block keeps its input only. `selective`: `"op"` keeps the results of matrix products and attention in
    every block, n makes every n-th block (the n-th, the 2n-th, …) keep its input only [Korthikanti et al. 2022, section
    5 has the trade-off]. `memory_budget` is the compiler's work, see `apply_compile`.
    """
    if config.mode in ("none", "memory_budget"):
        return
    every = config.selective if config.mode == "selective" and isinstance(config.selective, int) else 1
    keep_ops = config.mode == "selective" and config.selective == "op"
    for position, block in enumerate(layers.values(), start=1):
        if position % every == 0:
            block_class: Any = type(block)
            block.__class__ = _checkpointed_class(block_class, keep_ops)


@cache
def _checkpointed_class(block_class: Any, keep_ops: bool) -> Any:
    """The same block whose forward is checkpointed.

    Exchanging the class, as `fully_shard` does, keeps names, `isinstance` and copies of the model intact, and all
    blocks share one code object, so torch.compile compiles it once.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no block draws random numbers
    if keep_ops:
        options["context_fn"] = _keep_ops_context

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(block_class.forward, self)
        return checkpoint(run, *args, **options, **kwargs)

    return type(f"Checkpointed{block_class.__name__}", (block_class,), {"forward": forward})


def _keep_ops_context() -> Any:
    return create_selective_checkpoint_contexts(_keep_ops_policy)


def _keep_ops_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # By name, since attention operators exist only once their library has been imported.
    kept = op.name().partition(".")[0] in _KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
