"""Pipeline parallelism: which layers a stage holds, which stages a rank holds, and torch's schedules over them.

1F1B (Narayanan et al. 2019, PipeDream), its interleaved form (Narayanan et al. 2021, arXiv:2104.04473), interleaved
zero-bubble and ZB-V (Qi et al. 2023, arXiv:2401.10241), which split a backward pass into that of the inputs and that of
the weights, so that the latter fill the waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from archon.parallel.comm import Group
from archon.parallel.phase import phase
from archon.schema.config import PipelineConfig
from archon.schema.errors import LayoutError

ScheduleName = Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
SPLIT_BACKWARD = frozenset({"interleaved_zero_bubble", "zbv"})
_CLASSES = {
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class StagePlan:
    """The stages of a pipeline of `pp` ranks: `layers[s]` are the first layer of stage s and the one after its last."""

    schedule: ScheduleName
    pp: int
    layers: tuple[tuple[int, int], ...]

    @property
    def n_stages(self) -> int:
        return len(self.layers)

    def rank_of(self, stage: int) -> int:
        """Stages go round the ranks; those of a V come back by the way they went."""
        if self.schedule == "zbv":
            return min(stage, 2 * self.pp - 1 - stage)
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.n_stages) if self.rank_of(stage) == rank]

    def micro_batches(self, wanted: int) -> int:
        """How many micro-batches the schedule runs where `wanted` hold something; the rest are idle."""
        if self.schedule == "1f1b":
            return max(self.pp, wanted)
        least = self.n_stages if self.schedule in SPLIT_BACKWARD else self.pp
        return max(least, -(-wanted // self.pp) * self.pp)


def plan_stages(
    schedule: ScheduleName,
    pp: int,
    n_layers: int,
    *,
    stages_per_rank: int = 2,
    embedding_weight: float = 0.0,
    head_weight: float = 0.0,
    layers_per_stage: Sequence[int] | None = None,
) -> StagePlan:
    """Layers to stages, so that the heaviest stage is as light as possible.

    Args:
        stages_per_rank: of the interleaved schedules; 1F1B has one, a V two.
        embedding_weight, head_weight: what the first and the last stage do besides, in layers.
        layers_per_stage: the split by hand.

    Raises LayoutError where the layers do not suffice or the split by hand does not add up.
    """
    per_rank = {"1f1b": 1, "zbv": 2}.get(schedule, stages_per_rank)
    stages = pp * per_rank
    if layers_per_stage is None:
        if n_layers < stages:
            raise LayoutError(
                f"pipeline of p = {pp} with schedule {schedule} has {stages} stages, and the model {n_layers} layers; "
                "use a smaller p, or fewer stages a rank"
            )
        layers_per_stage = balanced_split(n_layers, stages, embedding_weight, head_weight)
    if len(layers_per_stage) != stages or sum(layers_per_stage) != n_layers or min(layers_per_stage) < 1:
        raise LayoutError(
            f"layers_per_stage is {list(layers_per_stage)}; expected {stages} numbers of at least 1 that add up to the "
            f"{n_layers} layers"
        )
    bounds = [sum(layers_per_stage[:stage]) for stage in range(stages + 1)]
    return StagePlan(schedule, pp, tuple(pairwise(bounds)))


def configured_stages(config: PipelineConfig, pp: int, n_layers: int) -> StagePlan:
    """`plan_stages` as the configuration says."""
    return plan_stages(
        config.schedule,
        pp,
        n_layers,
        stages_per_rank=config.stages_per_rank,
        embedding_weight=config.embedding_weight,
        head_weight=config.head_weight,
        layers_per_stage=config.layers_per_stage,
    )


def balanced_split(n_layers: int, stages: int, embedding: float, head: float) -> list[int]:
    """Layers of each stage, at least one, whose largest weight is the least possible; of equal ones, that in which
    later stages hold more."""
    return list(_balanced(n_layers, stages, embedding, head))


@lru_cache(maxsize=1024)
def _balanced(n_layers: int, stages: int, embedding: float, head: float) -> tuple[int, ...]:
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * n_layers]
    for stage in range(stages):
        extra = (embedding if stage == 0 else 0.0) + (head if stage == stages - 1 else 0.0)
        row = [(float("inf"), 0)] * (n_layers + 1)
        for end in range(stage + 1, n_layers + 1):
            row[end] = min((max(best[-1][start][0], end - start + extra), -start) for start in range(stage, end))
        best.append([(cost, -start) for cost, start in row])
    sizes, end = [], n_layers
    for stage in range(stages, 0, -1):
        start = best[stage][end][1]
        sizes.append(end - start)
        end = start
    return tuple(sizes[::-1])


def prune(model: Any, plan: StagePlan, stage: int) -> None:
    """Take from a whole model, still on the meta device, what other stages hold."""
    first, end = plan.layers[stage]
    for name in list(model.layers):
        if not first <= int(name) < end:
            del model.layers[name]
    if stage > 0:
        model.tok_embeddings = None
    if stage < plan.n_stages - 1:
        model.norm = model.output = model.score = None


class StagedModel(nn.Module):
    """The stages one rank holds, in their order, as one module whose parameters have the names of the whole model."""

    def __init__(self, plan: StagePlan, stages: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.plan, self.numbers = plan, tuple(stages)
        self.stages = nn.ModuleList(stages.values())

    def tie_weights(self) -> None:
        """Nothing: what is tied across stages has a gradient in common and no memory."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for stage in self.stages:
            yield from stage.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        for stage in self.stages:
            yield from stage.named_buffers(*args, **kwargs)


Run = Callable[[int, int, Tensor | None], Tensor]
"""(stage, micro-batch, hidden states of the stage before) to hidden states, or the last stage's loss, a scalar."""


class _Stage(PipelineStage):
    """A stage whose forward is the caller's: what a packed micro-batch is made of does not travel with it."""

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
    """Runs micro-batches of one shape through the stages of one group of ranks.

    Args:
        model: this rank's stages.
        group: the ranks of the pipeline.
        dtype: of the hidden states.
    """

    def __init__(self, model: StagedModel, group: Group, device: torch.device, dtype: torch.dtype, dim: int) -> None:
        self.model, self.group, self.device, self.dtype, self.dim = model, group, device, dtype, dim
        self._built: tuple[int, int] | None = None
        self._schedule: Any = None
        self._stages: list[_Stage] = []

    @property
    def plan(self) -> StagePlan:
        return self.model.plan

    def backward(self, run: Run, micro_batches: int, rows: int) -> None:
        """Every micro-batch forward and backward; gradients are reduced once, at the end.

        `rows` are the rows of the hidden states that one rank passes on.
        """
        key = (micro_batches, rows)
        if self._built != key:
            # One at a time: a schedule holds receive buffers of its shape, and packed batches have many shapes.
            self._schedule, self._stages = self._build(*key)
            self._built = key
        schedule, stages = self._schedule, self._stages
        for stage in stages:
            stage.run, stage.has_backward = run, True
        first = [(torch.zeros((), device=self.device),) if 0 in self.model.numbers else ()] * micro_batches
        schedule._step_microbatches(
            first,
            [{"micro_batch": index} for index in range(micro_batches)],
            target_mbs=[torch.zeros((), device=self.device)] * micro_batches,
            return_outputs=False,
        )
        schedule._internal_losses.clear()
        for stage in stages:
            del stage.run  # it holds the batch

    def _build(self, micro_batches: int, rows: int) -> tuple[Any, list[_Stage]]:
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
        make = _CLASSES[self.plan.schedule]
        options: dict[str, Any] = {"loss_fn": _loss, "scale_grads": False}
        return make(stages[0] if make is schedules.Schedule1F1B else stages, micro_batches, **options), stages

    @torch.no_grad()
    def forward(self, run: Run, micro_batches: int, rows: int) -> None:
        """Every micro-batch forward, one after the other."""
        for index in range(micro_batches):
            for number in self.model.numbers:
                hidden = None
                if number > 0:
                    hidden = self._receive(number, rows)
                out = run(number, index, hidden)
                if number < self.plan.n_stages - 1:
                    self._send(number, out)

    def _receive(self, stage: int, rows: int) -> Tensor:
        source = self.plan.rank_of(stage - 1)
        if source == self.group.rank:
            return self._kept
        hidden = torch.empty(rows, self.dim, dtype=self.dtype, device=self.device)
        torch.distributed.recv(hidden, group=self.group.process_group, group_src=source)
        return hidden

    def _send(self, stage: int, hidden: Tensor) -> None:
        target = self.plan.rank_of(stage + 1)
        if target == self.group.rank:
            self._kept = hidden
        else:
            torch.distributed.send(hidden.contiguous(), group=self.group.process_group, group_dst=target)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output
