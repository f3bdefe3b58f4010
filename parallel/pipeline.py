"""Pipeline parallelism: which layers a stage holds and which stages a rank holds, by schedule.

1F1B (Narayanan et al. 2019, PipeDream), its interleaved form (Narayanan et al. 2021, arXiv:2104.04473), interleaved
zero-bubble and ZB-V (Qi et al. 2023, arXiv:2401.10241), which split a backward pass into that of the inputs and that of
the weights, so that the latter fill the waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, get_args

from torch import nn

from archon.schema.config import PipelineConfig
from archon.schema.errors import LayoutError

ScheduleName = Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
SPLIT_BACKWARD = frozenset({"interleaved_zero_bubble", "zbv"})


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
    """Take from a whole model, still on the meta device, what other stages hold; a family may bring another function
    for it (`ModelSpec.pipelining_fn`)."""
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
