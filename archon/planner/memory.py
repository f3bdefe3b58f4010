"""Memory of one rank by part: what lies there through every step, exactly; what a step adds at its fullest, by formula.

A step is fullest in the head (all activations and the loss's tiles), when the backward pass sets out (all activations
and the first block's gradients), or when it ends (all gradients and those of the embedding and the head).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

from archon.models.args import BaseModelArgs
from archon.parallel.layout import ParallelLayout
from archon.parallel.pipeline import StagePlan, configured_stages
from archon.planner.activations import Block, BlockSizes, Head, Share, block_of, head_of
from archon.planner.weights import Layer, ModelWeights, Numels, numels
from archon.schema.config import EngineConfig

WIDTHS = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its fullest.

    `parameters` and `moments` are there through every step, `gradients` are those of this rank's shards. `gathered` are
    whole weights of the computation, `unreduced` gradients before they are shared out, `activations` everything that
    grows with the tokens, `head` the tiles and sums of head and loss.
    """

    parameters: int
    moments: int
    gradients: int
    gathered: int
    unreduced: int
    activations: int
    head: int

    @property
    def step(self) -> int:
        """What a step allocates and frees."""
        return self.total - self.parameters - self.moments

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class State:
    """Elements a rank holds, by its stages: each stage's layers and the rest."""

    layers: tuple[tuple[Numels, ...], ...]
    rest: tuple[Numels, ...]

    @property
    def own(self) -> int:
        return sum(n.own for stage in self.layers for n in stage) + sum(n.own for n in self.rest)

    @property
    def gathered(self) -> int:
        return sum(n.gathered for stage in self.layers for n in stage) + sum(n.gathered for n in self.rest)

    @property
    def experts(self) -> int:
        return sum(n.experts for stage in self.layers for n in stage)


def state_of(weights: ModelWeights, layout: ParallelLayout, plan: StagePlan | None, rank: int) -> State:
    """What `rank` of the layout holds; masters and each moment have so many elements."""
    stages = [0] if plan is None else plan.stages_of(rank // (layout.world_size // layout.pp))
    parts = [weights.stage(plan, stage) for stage in stages]
    found = {layer: _of_layer(layer, layout, rank) for layer in weights.kinds}
    return State(
        tuple(tuple(found[layer] for layer in layers) for layers, _ in parts),
        tuple(numels(rest, layout, rank) for _, rest in parts),
    )


def _of_layer(layer: Layer, layout: ParallelLayout, rank: int) -> Numels:
    return numels(layer.dense, layout, rank) + numels(layer.experts, layout, rank)


def in_flight(plan: StagePlan, rank: int, micro_batches: int) -> int:
    """Forward passes, of a stage and a micro-batch each, that a rank of the pipeline has under way at most.

    1F1B: pp - rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Interleaved: two more for each later rank,
    and a round of pp micro-batches for each stage but the last. The zero-bubble schedules: as 1F1B over all stages.
    """
    stages = len(plan.stages_of(rank))
    if plan.schedule == "interleaved_1f1b":
        under_way = (stages - 1) * plan.pp + 2 * (plan.pp - 1 - rank) + 1
    elif plan.schedule == "interleaved_zero_bubble":
        under_way = (stages - 1) * plan.pp + plan.pp - rank
    else:
        under_way = plan.pp - rank if plan.schedule == "1f1b" else 2 * plan.pp
    return min(under_way, stages * micro_batches)


class MemoryModel:
    """Foretells ranks of layouts of one model."""

    def __init__(self, args: BaseModelArgs, weights: ModelWeights, device_type: str = "cuda") -> None:
        self.args, self.weights, self.device_type = args, weights, device_type
        self._sizes = BlockSizes.of(args)
        self.sparse = [bool(layer.experts) for layer in weights.layers]
        """Whether a layer has experts: layers differ in nothing else."""

    def plan(self, config: EngineConfig, layout: ParallelLayout) -> StagePlan | None:
        """The stages of a layout with a pipeline."""
        return configured_stages(config.pipeline, layout.pp, self.args.n_layers) if layout.pp > 1 else None

    def of_rank(
        self, config: EngineConfig, layout: ParallelLayout, rank: int, tokens: int, micro_batches: int
    ) -> Memory:
        """Memory of `rank` at its fullest, in steps on `micro_batches` of `tokens` each, all of them scored."""
        plan = self.plan(config, layout)
        step = _Step(self, config, layout, plan, rank, tokens, micro_batches)
        return max(step.moments_of_time(), key=lambda memory: memory.total)

    def fullest(self, config: EngineConfig, layout: ParallelLayout, tokens: int, micro_batches: int) -> Memory:
        """Memory of the rank that needs most; within a stage the first holds the largest shards."""
        ranks = candidate_ranks(layout, self.plan(config, layout))
        found = (self.of_rank(config, layout, rank, tokens, micro_batches) for rank in ranks)
        return max(found, key=lambda memory: memory.total)

    def block(self, sparse: bool, share: Share, context_parallel: str) -> Block:
        """The tensors of a layer with or without experts."""
        return block_of(self._sizes, sparse, share, context_parallel)


def candidate_ranks(layout: ParallelLayout, plan: StagePlan | None) -> list[int]:
    """Ranks one of which holds most: of a pipeline's first and last, and the first of those with most layers."""
    if plan is None:
        return [0]

    def layers(rank: int) -> int:
        return sum(end - first for first, end in (plan.layers[stage] for stage in plan.stages_of(rank)))

    stage = layout.world_size // layout.pp
    return [rank * stage for rank in sorted({0, plan.pp - 1, max(range(plan.pp), key=layers)})]


class _Step:
    """One rank's training step."""

    def __init__(
        self,
        model: MemoryModel,
        config: EngineConfig,
        layout: ParallelLayout,
        plan: StagePlan | None,
        rank: int,
        tokens: int,
        micro_batches: int,
    ) -> None:
        self.model, self.config, self.layout, self.plan = model, config, layout, plan
        self.micro_batches = micro_batches if plan is None else plan.micro_batches(micro_batches)
        self.share = Share(layout, tokens, WIDTHS[config.dtype])
        self.state = state_of(model.weights, layout, plan, rank)
        self.pp_rank = rank // (layout.world_size // layout.pp)
        self.stages = [0] if plan is None else plan.stages_of(self.pp_rank)
        self.n_stages = 1 if plan is None else plan.n_stages
        self.sharded = layout.world_size > 1 or self.share.bytes < self.share.wide
        self.layer = max((n.gathered for stage in self.state.layers for n in stage), default=0)
        self.rest = sum(n.gathered for n in self.state.rest)
        self.base = Memory(self.state.own * self.share.wide, 2 * self.state.own * self.share.wide, 0, 0, 0, 0, 0)

    def moments_of_time(self) -> list[Memory]:
        found = [self.at_start_of_backward(later) for later in (False, True)] + [self.at_end()]
        return [*found, self.in_head()] if self.has_head else found

    @property
    def has_head(self) -> bool:
        return self.n_stages - 1 in self.stages

    @property
    def head(self) -> Head:
        return head_of(self.model.args, self.share, self.model.device_type) if self.has_head else Head(0, 0)

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients wait for later micro-batches."""
        return self.micro_batches > 1 and self.config.gradient_reduction == "per_step"

    # Activations

    def kept(self, stage: int) -> int:
        """Bytes a stage keeps of one micro-batch."""
        layers = range(self.model.args.n_layers) if self.plan is None else range(*self.plan.layers[stage])
        counts = Counter((self.model.sparse[layer], self._mode(at)) for at, layer in enumerate(layers, start=1))
        total = sum(count * self._kept(self._block(sparse), mode) for (sparse, mode), count in counts.items())
        # Cosines and sines [T, D / 2], and integers of the tokens: numbers, positions, labels, places.
        total += self.share.tokens * (self.model.args.head_dim * self.share.bytes + 64)
        return total + (self._stream if stage < self.n_stages - 1 else 0)

    @property
    def _stream(self) -> int:
        return self.share.rows * self.model.args.dim * self.share.bytes

    def _mode(self, position: int) -> str:
        """`none`, `full` or `op`: what becomes of the block at a position, from one, of its stage."""
        ac = self.config.activation_checkpoint
        if ac.mode != "selective":
            return "full" if ac.mode == "full" else "none"
        if ac.selective == "op":
            return "op"
        return "full" if position % ac.selective == 0 else "none"

    @staticmethod
    def _kept(block: Block, mode: str) -> int:
        return {"none": block.saved, "full": block.input, "op": block.of_ops}[mode]

    def _block(self, sparse: bool) -> Block:
        return self.model.block(sparse, self.share, self.config.context_parallel)

    def _again(self) -> int:
        """Bytes beyond what is kept when a block's backward is at its fullest."""
        again = 0
        for sparse in set(self.model.sparse):
            block = self._block(sparse)
            for mode in {self._mode(at) for at in range(1, self.model.args.n_layers + 1)}:
                made = {"none": 0, "full": block.saved - block.input, "op": block.recomputed}[mode]
                again = max(again, made + block.working)
        return again

    @property
    def buffers(self) -> int:
        """What a pipeline receives into: hidden states and gradients of every micro-batch."""
        inner = sum((stage > 0) + (stage < self.n_stages - 1) for stage in self.stages)
        received = sum(stage > 0 for stage in self.stages)
        # Hidden states received are the first block's input, which is counted with what it keeps.
        return self._stream * (inner * self.micro_batches - (received > 0) * self.under_way)

    @property
    def under_way(self) -> int:
        return 1 if self.plan is None else in_flight(self.plan, self.pp_rank, self.micro_batches)

    @property
    def activations(self) -> int:
        each = max(self.kept(stage) for stage in self.stages)
        even = sum(self.kept(stage) for stage in self.stages) // len(self.stages)
        return (self.under_way - 1) * even + each + (self.buffers if self.plan else 0)

    # Moments of time

    def in_head(self) -> Memory:
        head = self.head
        return replace(
            self.base,
            gradients=self._earlier,
            gathered=self._gathered(self.layer),
            unreduced=self._waiting,
            activations=self.activations,
            head=head.forward,
        )

    def at_start_of_backward(self, later: bool) -> Memory:
        """At the last block, or `later` at the one before, with the last one's gradients on their way."""
        gradients, unreduced = self._earlier, self._waiting
        if not self.sharded:
            unreduced += self.layer * self.share.wide if not self.accumulates else 0
        else:
            unreduced += self.layer * self.share.bytes // 3
        if later and self.sharded and not self.accumulates:
            unreduced += self.layer * self.share.wide
            gradients = max(gradients, self._shards // self.model.args.n_layers)
        freed = min(self.kept(stage) // max(len(self.state.layers[0]), 1) for stage in self.stages) if later else 0
        return replace(
            self.base,
            gradients=gradients,
            gathered=self._gathered(2 * self.layer),
            unreduced=unreduced,
            activations=self.activations - freed + self._again(),
            head=self.head.gradient,
        )

    def at_end(self) -> Memory:
        """When the gradients of embedding and head are shared out; they are the last."""
        wide = self.share.wide
        first = self.model.sparse[0]
        unreduced = self.rest * (self.share.bytes + wide) if self.sharded else 0
        if self.accumulates and self.sharded:
            unreduced = (self.rest + self.layer) * wide
        return replace(
            self.base,
            gradients=self._shards,
            gathered=self._gathered(0),
            unreduced=unreduced,
            activations=self.kept(self.stages[0]) // max(len(self.state.layers[0]), 1) + self._block(first).input,
        )

    @property
    def _shards(self) -> int:
        return self.state.own * self.share.wide

    @property
    def _earlier(self) -> int:
        """Gradients that earlier micro-batches have left on this rank."""
        return self._shards if self.micro_batches > 1 and not (self.accumulates and self.sharded) else 0

    @property
    def _waiting(self) -> int:
        waits = self.accumulates and self.sharded and self.micro_batches > self.under_way
        return self.state.gathered * self.share.wide if waits else 0

    def _gathered(self, layers: int) -> int:
        if not self.sharded:
            return 0
        if self.config.reshard_after_forward == "never" or (
            self.plan is not None and self.config.reshard_after_forward != "always"
        ):
            return self.state.gathered * self.share.bytes
        return (self.rest + layers) * self.share.bytes
