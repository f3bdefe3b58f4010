"""Run micro-batches through pipeline stages with the schedules of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from archon.parallel.comm import Group
from archon.parallel.phase import phase
from archon.parallel.pipeline import StagedModel, StagePlan
from archon.parallel.torch_private import require_private_apis, run_schedule

_CLASSES = {
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
require_private_apis("pipeline")

Run = Callable[[int, int, Tensor | None], Tensor]
"""(stage, micro-batch, hidden states of the previous stage) -> hidden states, or the scalar loss of the last stage."""


class _Stage(PipelineStage):
    """Stage that calls a function as its forward; only hidden states pass between stages."""

    run: Run

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.stage_index, kwargs["micro_batch"], None if self.is_first else args[0])

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with phase("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class Pipeline:
    """Schedule of micro-batches of one shape through the stages of one group of ranks.

    Args:
        model: this rank's stages.
        group: the ranks of the pipeline.
        dtype, dim: of the hidden states.
    """

    def __init__(self, model: StagedModel, group: Group, device: torch.device, dtype: torch.dtype, dim: int) -> None:
        self.model, self.group, self.device, self.dtype, self.dim = model, group, device, dtype, dim
        self.plan: StagePlan = model.plan
        self._schedules: dict[tuple[int, int], tuple[Any, list[_Stage]]] = {}

    def backward(self, run: Run, micro_batches: int, rows: int) -> None:
        """Run every micro-batch forward and backward; gradients are reduced once, at the end.

        `rows` are the rows of the hidden states that one rank sends.
        """
        key = (micro_batches, rows)
        if key not in self._schedules:
            # Keep only the latest schedule: it holds receive buffers of its shape, and packed batches have many shapes.
            self._schedules = {key: self._build_schedule(*key)}
        schedule, stages = self._schedules[key]
        for stage in stages:
            stage.run, stage.has_backward = run, True
        first = [(torch.zeros((), device=self.device),) if 0 in self.model.numbers else ()] * micro_batches
        numbers = [{"micro_batch": index} for index in range(micro_batches)]
        run_schedule(schedule, first, numbers, [torch.zeros((), device=self.device)] * micro_batches)
        for stage in stages:
            del stage.run  # it holds the batch

    def _build_schedule(self, micro_batches: int, rows: int) -> tuple[Any, list[_Stage]]:
        stages = []
        hidden = torch.empty(rows, self.dim, dtype=self.dtype, device="meta")
        scalar = torch.empty((), dtype=torch.float32, device="meta")
        for number, module in zip(self.model.numbers, self.model.stages, strict=True):
            last = number == self.plan.n_stages - 1
            stages.append(
                _Stage(
                    module,
                    number,
                    self.plan.n_stages,
                    self.device,
                    input_args=scalar if number == 0 else hidden.clone().requires_grad_(),
                    output_args=scalar.clone().requires_grad_() if last else hidden.clone().requires_grad_(),
                    group=self.group.process_group,
                )
            )
        make = getattr(schedules, _CLASSES[self.plan.schedule])
        options: dict[str, Any] = {"loss_fn": _loss, "scale_grads": False}
        return make(stages[0] if make is schedules.Schedule1F1B else stages, micro_batches, **options), stages

    @torch.no_grad()
    def forward(self, run: Run, micro_batches: int, rows: int) -> None:
        """Run every micro-batch forward, one after the other."""
        for index in range(micro_batches):
            for number in self.model.numbers:
                out = run(number, index, self._receive(number, rows) if number else None)
                if number < self.plan.n_stages - 1:
                    self._send(number, out)

    def _receive(self, stage: int, rows: int) -> Tensor:
        source = self.plan.stage_rank(stage - 1)
        if source == self.group.rank:
            return self._hidden
        hidden = torch.empty(rows, self.dim, dtype=self.dtype, device=self.device)
        torch.distributed.recv(hidden, group=self.group.process_group, group_src=source)
        return hidden

    def _send(self, stage: int, hidden: Tensor) -> None:
        target = self.plan.stage_rank(stage + 1)
        if target == self.group.rank:
            self._hidden = hidden
        else:
            torch.distributed.send(hidden.contiguous(), group=self.group.process_group, group_dst=target)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output
