"""Pipeline parallelism: the layers of each stage and the stages of each rank, by schedule.

1F1B (Narayanan et al. 2019, PipeDream), its interleaved form (Narayanan et al. 2021, arXiv:2104.04473), interleaved
zero-bubble and ZB-V (Qi et al. 2023, arXiv:2401.10241). The last two split the backward pass into input gradients and
weight gradients, and fill the bubbles with weight gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch import nn

from archon.schema.config import PipelineConfig
from archon.schema.errors import LayoutError

SPLIT_BACKWARD = frozenset({"interleaved_zero_bubble", "zbv"})


@dataclass(frozen=True)
class StagePlan:
    """Stages of a pipeline of `pp` ranks: `layers[s]` is the (first, last + 1) layer of stage s."""

    schedule: str
    pp: int
    layers: tuple[tuple[int, int], ...]

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return len(self.layers)

    def stage_rank(self, stage: int) -> int:
        """Return the rank of a stage: round robin, or down and back up the ranks for ZB-V."""
        if self.schedule == "zbv":
            return min(stage, 2 * self.pp - 1 - stage)
        return stage % self.pp

    def rank_stages(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [stage for stage in range(self.n_stages) if self.stage_rank(stage) == rank]

    def micro_batches(self, requested: int) -> int:
        """Return how many micro-batches the schedule runs for `requested` real ones; the rest are idle."""
        if self.schedule == "1f1b":
            return max(self.pp, requested)
        minimum = self.n_stages if self.schedule in SPLIT_BACKWARD else self.pp
        return max(minimum, -(-requested // self.pp) * self.pp)


def plan_stages(config: PipelineConfig, pp: int, n_layers: int, deepstack_layers: int = 0) -> StagePlan:
    """Assign layers to stages; by default the heaviest stage is as light as possible.

    1F1B has one stage per rank and ZB-V two, whatever `stages_per_rank` is. The first `deepstack_layers` layers are on
    the first stage.

    Raises:
        LayoutError: too few layers for the stages or for the first stage, or `layers_per_stage` does not add up.
    """
    least = max(1, deepstack_layers)
    stages = pp * {"1f1b": 1, "zbv": 2}.get(config.schedule, config.stages_per_rank)
    sizes = config.layers_per_stage
    if sizes is None:
        if n_layers < stages - 1 + least:
            first = f", the first {least} with the vision encoder" if least > 1 else ""
            raise LayoutError(
                f"pipeline of p = {pp} with schedule {config.schedule} has {stages} stages, and the model {n_layers} "
                f"layers{first}; use a smaller p, or fewer stages a rank"
            )
        sizes = [*_balanced_split(n_layers, stages, config.head_weight, least)]
    if len(sizes) != stages or sum(sizes) != n_layers or min(sizes) < 1:
        raise LayoutError(
            f"layers_per_stage is {sizes}; expected {stages} numbers of at least 1 that add up to the {n_layers} layers"
        )
    if sizes[0] < least:
        raise LayoutError(
            f"layers_per_stage is {sizes}; expected at least {least} layers on the first stage, which adds the image "
            "features of the vision encoder"
        )
    bounds = [sum(sizes[:stage]) for stage in range(stages + 1)]
    return StagePlan(config.schedule, pp, tuple(pairwise(bounds)))


@lru_cache(maxsize=1024)
def _balanced_split(n_layers: int, stages: int, head: float, least: int) -> tuple[int, ...]:
    """Return the number of layers of each stage that minimizes the weight of the heaviest stage.

    Every stage has at least one layer, the first at least `least`. Ties give more layers to later stages. `head` is the
    extra weight of the last stage.
    """
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * n_layers]
    for stage in range(stages):
        extra = head if stage == stages - 1 else 0.0
        row = [(float("inf"), 0)] * (n_layers + 1)
        for end in range(stage + least, n_layers + 1):
            row[end] = min((max(best[-1][start][0], end - start + extra), -start) for start in range(stage, end))
        best.append([(cost, -start) for cost, start in row])
    sizes, end = [], n_layers
    for stage in range(stages, 0, -1):
        start = best[stage][end][1]
        sizes.append(end - start)
        end = start
    return tuple(sizes[::-1])


def prune(model: Any, plan: StagePlan, stage: int) -> None:
    """Remove the modules of other stages from a model on the meta device; the default `ModelSpec.pipelining_fn`."""
    first, end = plan.layers[stage]
    for name in list(model.layers):
        if not first <= int(name) < end:
            del model.layers[name]
    if stage > 0:
        model.tok_embeddings = None
        if getattr(model, "visual", None) is not None:  # its rows are embeddings
            model.visual = None
    if stage < plan.n_stages - 1:
        model.norm = model.output = model.score = None


class StagedModel(nn.Module):
    """Stages of one rank as one module; parameters keep the names of the full model."""

    def __init__(self, plan: StagePlan, stages: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.plan, self.numbers = plan, tuple(stages)
        self.stages = nn.ModuleList(stages.values())

    def tie_weights(self) -> None:
        """Do nothing: weights tied across stages share a gradient, not memory."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the parameters of all stages."""
        for stage in self.stages:
            yield from stage.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the buffers of all stages."""
        for stage in self.stages:
            yield from stage.named_buffers(*args, **kwargs)
