"""The signature every family's `parallelize_<family>` has; what differs between families is the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from archon.models.attention.registry import saved_ops
from archon.parallel.decoder import parallelize_decoder
from archon.parallel.tensor import Treatment

if TYPE_CHECKING:
    from archon.models.base import BaseArchonModel
    from archon.models.spec import ParallelizeFn
    from archon.parallel.compile import CompileChoice
    from archon.parallel.dims import ArchonParallelDims
    from archon.parallel.fsdp import ReshardPolicy
    from archon.schema.config import ActivationCheckpointConfig

# How tensor parallelism treats the weight of each role; see `archon.parallel.tensor`.
DENSE_TP_PLAN: dict[str, Treatment] = {
    "column": "split_rows",
    "row": "split_columns",
    "norm": "replicate",
    "head_norm": "replicate",
    "embedding": "split_rows",
    "head": "split_rows",
    "value_head": "replicate",
}
# Experts are laid out by expert parallelism.
MOE_TP_PLAN: dict[str, Treatment] = DENSE_TP_PLAN | {"router": "replicate"}


def make_parallelize_fn(tp_plan: Mapping[str, Treatment]) -> ParallelizeFn:
    """A family's parallelize function: its tensor-parallel plan, by role, and the shared order of application."""

    def parallelize(
        model: nn.Module,
        parallel_dims: ArchonParallelDims,
        param_dtype: torch.dtype = torch.bfloat16,
        reduce_dtype: torch.dtype = torch.float32,
        loss_parallel: bool = True,
        cpu_offload: bool = False,
        reshard_after_forward_policy: ReshardPolicy = "default",
        ac_config: ActivationCheckpointConfig | None = None,
        enable_compile: CompileChoice = "auto",
    ) -> nn.Module:
        """Apply a layout in place; see `archon.parallel.decoder.parallelize_decoder`."""
        return parallelize_decoder(
            model,
            parallel_dims,
            tp_plan,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            loss_parallel=loss_parallel,
            cpu_offload=cpu_offload,
            reshard_after_forward_policy=reshard_after_forward_policy,
            ac_config=ac_config,
            attention_ops=saved_ops(cast("BaseArchonModel", model).args.attn_type),
            enable_compile=enable_compile,
        )

    return parallelize
