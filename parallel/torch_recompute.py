"""What archon changes of PyTorch's selective recomputation that is private: operators that it does not count."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from archon.parallel.torch_parts import require_parts

PARTS = (
    "torch.utils.checkpoint.SAC_IGNORED_OPS",
    "torch.ops.profiler._record_function_enter_new.default",
    "torch.ops.profiler._record_function_exit._RecordFunction",
)
require_parts("activation checkpointing", PARTS)


def ignore_profiler_marks() -> None:
    """Let a block that is run again set other marks for the profiler than before; for the whole process.

    Experts that FSDP shards by themselves gather within the block, and FSDP's marks are not as many when the block is
    run again; torch counts every operator it does not know to be free of effect.
    """
    torch.utils.checkpoint.SAC_IGNORED_OPS.update(
        {
            torch.ops.profiler._record_function_enter_new.default,
            torch.ops.profiler._record_function_exit._RecordFunction,
        }
    )
