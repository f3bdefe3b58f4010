"""Which part of every weight a rank of a layout holds: the arithmetic of `archon.parallel`, without a process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
class Weight:
    """A parameter: its whole shape, the role of its layer, and the heads that its rows form, if any."""

    shape: tuple[int, ...]
    role: str
    name: str
    heads: int | None = None

    def local(self, layout: ParallelLayout) -> tuple[int, ...]:
        """What tensor and expert parallelism leave of it: what FSDP gathers."""
        shape, tp = list(self.shape), layout.tp
        if self.role == "experts":
            shape[0] //= layout.ep
            shape[2 if self.name == "w2" else 1] //= layout.etp
            return tuple(shape)
        treatment = MOE_TP_PLAN[self.role]
        if treatment == "split_rows" and (self.heads is None or self.heads % tp == 0):
            shape[0] //= tp
        elif treatment == "split_columns" and self.name == "weight":
            shape[1] //= tp
        return tuple(shape)

    def shard(self, layout: ParallelLayout, rank: int) -> int:
        """Elements of the part that FSDP leaves to `rank`; it cuts as torch.chunk does."""
        shape = self.local(layout)
        if self.role != "experts":
            ways = layout.dp_shard * layout.cp
            return _cut(shape[0], ways, rank // layout.tp % ways) * prod(shape[1:])
        within = layout.ep * layout.etp
        ways = layout.dp_shard * layout.cp * layout.tp // within
        # See `archon.parallel.fsdp`: fewer experts than ranks are cut along their rows.
        along = 1 if shape[0] < ways and shape[1] % ways == 0 else 0
        return prod(shape) // shape[along] * _cut(shape[along], ways, rank // within % ways)


def _cut(rows: int, ways: int, index: int) -> int:
    step = -(-rows // ways)
    return max(0, min(step, rows - index * step))


@dataclass(frozen=True)
class Numels:
    """Elements of a set of weights: on one rank, and gathered over the ranks that FSDP spreads them over; `experts` are
    those of the gathered that come from an expert's own ranks."""

    own: int = 0
    gathered: int = 0
    experts: int = 0

    def __add__(self, other: Numels) -> Numels:
        return Numels(self.own + other.own, self.gathered + other.gathered, self.experts + other.experts)

    def __mul__(self, times: int) -> Numels:
        return Numels(self.own * times, self.gathered * times, self.experts * times)


@lru_cache(maxsize=65536)
def numels(weights: tuple[Weight, ...], layout: ParallelLayout, rank: int) -> Numels:
    """What `rank` holds of `weights`, and what it gathers of them."""
    local = [(prod(w.local(layout)), w.role == "experts") for w in weights]
    return Numels(
        sum(w.shard(layout, rank) for w in weights),
        sum(size for size, _ in local),
        sum(size for size, expert in local if expert),
    )


@dataclass(frozen=True)
class Layer:
    """One block's weights; experts apart, since FSDP gathers them by themselves. Layers of one `kind` are equal."""

    dense: tuple[Weight, ...] = field(compare=False)
    experts: tuple[Weight, ...] = field(compare=False)
    kind: int


@dataclass(frozen=True)
class ModelWeights:
    """A model's weights by where they lie. `tied`: the head is the embedding, copied where a pipeline parts them."""

    layers: tuple[Layer, ...]
    embedding: tuple[Weight, ...]
    head: tuple[Weight, ...]
    tied: bool

    @property
    def kinds(self) -> set[Layer]:
        """Layers that differ."""
        return set(self.layers)

    @classmethod
    def of(cls, spec: ModelSpec, args: BaseModelArgs) -> ModelWeights:
        """Read off the model's modules and their roles, on the meta device."""
        with torch.device("meta"):
            model = spec.model_class(args)
        tied = args.tie_word_embeddings and not args.is_critic
        outside = {name: tuple(_weights(part)) for name, part in model.named_children() if name != "layers"}
        head = tuple(w for name in ("norm", "output", "score") for w in outside.get(name, ()))
        layers = [tuple(_weights(block)) for block in model.layers.values()]
        kinds = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
        split = [
            Layer(
                tuple(w for w in layer if w.role != "experts"),
                tuple(w for w in layer if w.role == "experts"),
                kinds[layer],
            )
            for layer in layers
        ]
        return cls(tuple(split), outside["tok_embeddings"], head, tied)

    def root(self, first: bool, last: bool) -> tuple[Weight, ...]:
        """What a stage holds besides layers: embedding, final norm and head, the tied one once."""
        held = self.embedding if first else ()
        if last:
            held += tuple(w for w in self.head if not (first and self.tied and w.role == "head"))
        return held

    def stage(self, plan: StagePlan | None, stage: int) -> tuple[tuple[Layer, ...], tuple[Weight, ...]]:
        """The layers and the rest of one stage of a pipeline; of the whole model without one."""
        if plan is None:
            return self.layers, self.root(True, True)
        return self.layers[slice(*plan.layers[stage])], self.root(stage == 0, stage == plan.n_stages - 1)


def _weights(module: nn.Module) -> Iterator[Weight]:
    for part in module.modules():
        role, heads = getattr(part, "role", None), getattr(part, "heads", None)
        for name, parameter in part.named_parameters(recurse=False):
            assert role is not None, f"a parameter {name} without a role"
            yield Weight(tuple(parameter.shape), role, name, heads)
