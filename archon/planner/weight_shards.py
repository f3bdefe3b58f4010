"""Computes the size of every weight's shard on a rank, as `archon.parallel` shards, without a process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import nn

from archon.models.args import BaseModelArgs
from archon.models.parallelize import MOE_TP_PLAN
from archon.models.spec import ModelSpec
from archon.parallel.layout import ParallelLayout
from archon.parallel.pipeline import StagePlan


@dataclass(frozen=True)
class ParameterShape:
    """A parameter: its full shape, its role, and the number of heads that share its rows, if any."""

    shape: tuple[int, ...]
    role: str
    name: str
    heads: int | None = None

    def local(self, layout: ParallelLayout) -> tuple[int, ...]:
        """Returns its shape after tensor and expert parallelism, which is what FSDP gathers."""
        shape, tp = list(self.shape), layout.tp
        if self.role == "experts":
            shape[0] //= layout.ep
            shape[2 if self.name == "w2" else 1] //= layout.etp
            return tuple(shape)
        treatment = MOE_TP_PLAN[self.role]
        if treatment == "split_rows" and (self.heads is None or self.heads % tp == 0):
            shape[0] //= tp
        elif treatment == "split_columns" and len(shape) > 1:
            shape[1] //= tp
        return tuple(shape)

    def shard(self, layout: ParallelLayout, rank: int) -> int:
        """Returns the elements of its FSDP shard on `rank`; FSDP shards as torch.chunk does."""
        shape = self.local(layout)
        if self.role != "experts":
            ways = layout.dp_shard * layout.cp
            return _chunk_rows(shape[0], ways, rank // layout.tp % ways) * prod(shape[1:])
        within = layout.ep * layout.etp
        ways = layout.dp_shard * layout.cp * layout.tp // within
        # `archon.parallel.fsdp` shards fewer experts than ranks along their rows.
        dim = 1 if shape[0] < ways and shape[1] % ways == 0 else 0
        return prod(shape) // shape[dim] * _chunk_rows(shape[dim], ways, rank // within % ways)


def _chunk_rows(rows: int, ways: int, index: int) -> int:
    step = -(-rows // ways)
    return max(0, min(step, rows - index * step))


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of a set of weights: of one rank's shards (`own`), and after FSDP's all-gather (`gathered`).

    `experts` are the gathered elements of experts, which have an FSDP group of their own.
    """

    own: int
    gathered: int
    experts: int


@lru_cache(maxsize=65536)
def count_parameters(weights: tuple[ParameterShape, ...], layout: ParallelLayout, rank: int) -> ParameterCounts:
    """Returns the element counts of `weights` on `rank`."""
    local = [(prod(w.local(layout)), w.role == "experts") for w in weights]
    return ParameterCounts(
        sum(w.shard(layout, rank) for w in weights),
        sum(size for size, _ in local),
        sum(size for size, expert in local if expert),
    )


@dataclass(frozen=True)
class ModelWeights:
    """A model's weights. `tied`: the head is the embedding; a pipeline's last stage has a copy of it.

    `layers` has, by layer, the index of its weights in `distinct_layers`.
    """

    layers: tuple[int, ...]
    distinct_layers: tuple[tuple[ParameterShape, ...], ...]
    embedding: tuple[ParameterShape, ...]
    head: tuple[ParameterShape, ...]
    tied: bool

    @classmethod
    def of(cls, spec: ModelSpec, args: BaseModelArgs) -> ModelWeights:
        """Returns the weights of the family's model, built on the meta device."""
        with torch.device("meta"):
            model = spec.model_class(args)
        outside = {name: tuple(_weights(part)) for name, part in model.named_children() if name != "layers"}
        head = tuple(w for name in ("norm", "output", "score") for w in outside.get(name, ()))
        layers = [tuple(_weights(block)) for block in model.layers.values()]
        distinct = tuple(dict.fromkeys(layers))
        tied = args.tie_word_embeddings and not args.is_critic
        return cls(tuple(map(distinct.index, layers)), distinct, outside["tok_embeddings"], head, tied)

    def stage(self, plan: StagePlan | None, stage: int) -> tuple[tuple[int, ...], tuple[ParameterShape, ...]]:
        """Returns the layers of a pipeline stage, or of the whole model without a pipeline, and its other weights.

        These are the embedding, the final norm and the head; a tied head is counted only once.
        """
        layers = self.layers if plan is None else self.layers[slice(*plan.layers[stage])]
        first, last = stage == 0, plan is None or stage == plan.n_stages - 1
        others = self.embedding if first else ()
        if last:
            others += tuple(w for w in self.head if not (first and self.tied and w.role == "head"))
        return layers, others


def _weights(module: nn.Module) -> Iterator[ParameterShape]:
    for part in module.modules():
        heads, roles = getattr(part, "heads", None), getattr(part, "parameter_roles", {})
        for name, parameter in part.named_parameters(recurse=False):
            role = roles.get(name, getattr(part, "role", None))
            assert role is not None, f"parameter {name} of {type(part).__name__} has no role"
            yield ParameterShape(tuple(parameter.shape), role, name, heads)
