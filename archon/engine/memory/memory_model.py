"""Predicted memory of one rank: exact sizes of the permanent allocations, and an estimate of a step's peak.

A step peaks at one of three points: in the head (all activations and the loss's tiles), at the start of the backward
pass (all activations and the last block's gradients), or at its end (all gradients, embedding and head included).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial

from archon.engine.memory.activations import (
    BlockActivations,
    LoRAMatrices,
    MicroBatchShard,
    block_activations,
    head_memory,
)
from archon.engine.memory.weight_shards import ModelWeights, ParameterCounts, ParameterShape, count_parameters
from archon.models.args.base import BaseModelArgs
from archon.models.layers.spec import LayerSpec
from archon.parallel.activation_offload import MAX_DEVICE_INPUTS
from archon.parallel.layout import ParallelLayout
from archon.parallel.pipeline import StagePlan, plan_stages
from archon.schema.config import EngineConfig

WIDTHS = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of one rank.

    With LoRA, the parameters are frozen in the compute dtype; only the LoRA has gradients and moments.

    Attributes:
        parameters: shards of the weights; allocated throughout training, as are `lora` and `moments`.
        lora: shards of the LoRA weights.
        moments: shards of the optimizer's moments.
        gradients: shards of the gradients.
        gathered: all-gathered weights.
        unreduced: gradients before their reduce-scatter.
        activations: everything that grows with the tokens, except the head.
        head: tiles and sums of the head and the loss.
    """

    parameters: int
    lora: int
    moments: int
    gradients: int
    gathered: int
    unreduced: int
    activations: int
    head: int

    @property
    def step(self) -> int:
        """Bytes that a step allocates and frees."""
        return self.total - self.parameters - self.lora - self.moments

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class RankParameters:
    """Element counts of a rank's parameters, LoRA excluded.

    Attributes:
        local: this rank's shards.
        gathered: all layers of the rank after FSDP's all-gather.
        experts: the experts' part of `gathered`.
        largest_layer: the largest layer's part of `gathered`.
        outside_layers: the part of `gathered` outside layers: embedding, norm and head.
        matrices: the part of `local` that Muon trains.
        muon_flops: this rank's FLOPs to orthogonalize Muon's updates.
        lora: counts of the LoRA weights; if present, all other weights are frozen.
        quantized: bytes of this rank's shards of a quantized base, which the counts above leave out.
        quantized_gathered: its bytes after FSDP's all-gather, all layers.
        largest_quantized_layer: the largest layer's part of `quantized_gathered`.
        largest_quantized: elements of the largest quantized matrix.
    """

    local: int = 0
    gathered: int = 0
    experts: int = 0
    largest_layer: int = 0
    outside_layers: int = 0
    matrices: int = 0
    muon_flops: float = 0.0
    lora: RankParameters | None = None
    quantized: int = 0
    quantized_gathered: int = 0
    largest_quantized_layer: int = 0
    largest_quantized: int = 0

    @property
    def trained(self) -> RankParameters:
        """Counts of the parameters with masters, gradients and moments."""
        return self.lora or self

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of weights, gradients and two moments; frozen weights are in `dtype` and have no others."""
        width = WIDTHS[dtype]
        return (
            4 * max(4, width) * self.trained.local + (0 if self.lora is None else self.local * width) + self.quantized
        )


def moment_bytes(config: EngineConfig, trained: RankParameters, wide: int) -> int:
    """Return the bytes of two moments, of one for matrices of Muon; 8 bits have a float32 scale for 256 elements."""
    moments = "float32" if config.optimizer is None else config.optimizer.moments
    with_muon = config.optimizer is not None and config.optimizer.kind == "muon"
    numbers = 2 * trained.local - (trained.matrices if with_muon else 0)
    return int(numbers * {"float32": float(wide), "bfloat16": 2.0, "int8": 1 + 4 / 256}[moments])


def rank_parameters(
    weights: ModelWeights, layout: ParallelLayout, plan: StagePlan | None, rank: int, *, lora: bool = False
) -> RankParameters:
    """Return the parameter counts of `rank`; with `lora`, of its LoRA and saved modules alone.

    A saved module counts as trained, and its frozen original is kept but never gathered.
    """
    stages = [0] if plan is None else plan.rank_stages(rank // (layout.world_size // layout.pp))
    parts = [weights.stage(plan, stage) for stage in stages]
    distinct = [_count(layer, layout, rank, lora=lora) for layer in weights.distinct_layers]
    layers = [distinct[index] for indices, _ in parts for index in indices]
    outside_layers = [_count(root, layout, rank, lora=lora) for _, root in parts]
    return RankParameters(
        local=sum(count.local for count in (*layers, *outside_layers)),
        gathered=sum(count.gathered for count in (*layers, *outside_layers)),
        experts=sum(count.experts for count in layers),
        largest_layer=max((count.gathered for count in layers), default=0),
        outside_layers=sum(count.gathered for count in outside_layers),
        matrices=sum(count.matrices for count in (*layers, *outside_layers)),
        muon_flops=sum(count.muon_flops for count in (*layers, *outside_layers)),
        lora=rank_parameters(weights, layout, plan, rank, lora=True) if weights.has_lora and not lora else None,
        quantized=sum(count.quantized for count in layers),
        quantized_gathered=sum(count.quantized_gathered for count in layers),
        largest_quantized_layer=max((count.quantized_gathered for count in layers), default=0),
        largest_quantized=max((count.largest_quantized for count in layers), default=0),
    )


def _count(weights: tuple[ParameterShape, ...], layout: ParallelLayout, rank: int, *, lora: bool) -> ParameterCounts:
    """Return the counts of LoRA and saved weights, or of all other weights; see `rank_parameters`."""
    if lora:
        return count_parameters(tuple(w for w in weights if w.is_lora or w.saved), layout, rank)
    counts = count_parameters(tuple(w for w in weights if not w.is_lora and not w.saved), layout, rank)
    originals = count_parameters(tuple(w for w in weights if w.saved), layout, rank)
    return replace(counts, local=counts.local + originals.local)


def in_flight(plan: StagePlan, rank: int, micro_batches: int) -> int:
    """Return the maximum number of forward passes (stage × micro-batch) that wait for their backward.

    1F1B: pp - rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Interleaved: two more for each later rank,
    and pp micro-batches for each stage but the last. Zero-bubble schedules: as 1F1B over all stages.
    """
    stages = len(plan.rank_stages(rank))
    if plan.schedule == "interleaved_1f1b":
        passes = (stages - 1) * plan.pp + 2 * (plan.pp - 1 - rank) + 1
    elif plan.schedule == "interleaved_zero_bubble":
        passes = (stages - 1) * plan.pp + plan.pp - rank
    else:
        passes = plan.pp - rank if plan.schedule == "1f1b" else 2 * plan.pp
    return min(passes, stages * micro_batches)


class MemoryModel:
    """Memory model of ranks in layouts of one model, on GPUs with `gpu_memory` bytes; None for a CPU."""

    def __init__(self, args: BaseModelArgs, weights: ModelWeights, gpu_memory: int | None) -> None:
        self.args, self.weights, self.gpu_memory = args, weights, gpu_memory
        self.block = lru_cache(maxsize=16384)(partial(block_activations, args.dim))
        self.layers = list(zip(args.layer_specs, weights.lora_layers, strict=True))
        """Spec and LoRA matrices of each layer."""
        self.rotated_features = sum(rope.dim for rope in args.ropes)
        self._sizes = args.sizes

    def plan(self, config: EngineConfig, layout: ParallelLayout) -> StagePlan | None:
        """Return the pipeline stages of a layout; None without pipeline parallelism."""
        sizes = self._sizes
        return plan_stages(config.pipeline, layout.pp, sizes.layers, sizes.deepstack_layers) if layout.pp > 1 else None

    def estimate_rank(
        self, config: EngineConfig, layout: ParallelLayout, rank: int, tokens: int, micro_batches: int
    ) -> MemoryEstimate:
        """Return the peak memory of `rank` in steps of `micro_batches` × `tokens` tokens, all of them scored."""
        plan = self.plan(config, layout)
        step = _Step(self, config, layout, plan, rank, tokens, micro_batches)
        return max(step.estimates(), key=lambda memory: memory.total)

    def estimate_largest_rank(
        self, config: EngineConfig, layout: ParallelLayout, tokens: int, micro_batches: int
    ) -> MemoryEstimate:
        """Return the peak memory of the largest rank."""
        ranks = candidate_ranks(layout, self.plan(config, layout))
        estimates = (self.estimate_rank(config, layout, rank, tokens, micro_batches) for rank in ranks)
        return max(estimates, key=lambda memory: memory.total)

    def host_bytes(self, config: EngineConfig, layout: ParallelLayout, tokens: int, micro_batches: int) -> int:
        """Return the pinned host memory of the rank that offloads most activations; 0 without offload."""
        plan = self.plan(config, layout)
        ranks = candidate_ranks(layout, plan)
        return max(_Step(self, config, layout, plan, rank, tokens, micro_batches).host for rank in ranks)


def candidate_ranks(layout: ParallelLayout, plan: StagePlan | None) -> list[int]:
    """Return the candidates for the largest rank: in the first and last stages, and in the stage with most layers.

    Within a stage, the first rank has the largest shards.
    """
    if plan is None:
        return [0]
    sizes = [end - first for first, end in plan.layers]
    layers = [sum(sizes[stage] for stage in plan.rank_stages(rank)) for rank in range(plan.pp)]
    stage = layout.world_size // layout.pp
    return [rank * stage for rank in sorted({0, plan.pp - 1, layers.index(max(layers))})]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


class _Step:
    """Memory of one rank at each possible peak of a training step."""

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
        self.model, self.config, self.plan = model, config, plan
        self.micro_batches = micro_batches if plan is None else plan.micro_batches(micro_batches)
        self.shard = MicroBatchShard(layout, tokens, WIDTHS[config.dtype])
        self.counts = rank_parameters(model.weights, layout, plan, rank)
        self.pp_rank = rank // (layout.world_size // layout.pp)
        self.stages = [0] if plan is None else plan.rank_stages(self.pp_rank)
        self.n_stages = 1 if plan is None else plan.n_stages
        self.in_flight = 1 if plan is None else in_flight(plan, self.pp_rank, self.micro_batches)
        self.has_head = self.n_stages - 1 in self.stages
        self.trained = self.counts.trained
        self.frozen = self.counts.lora is not None
        freezes_head = self.frozen and not model.weights.trains_head
        head = head_memory(model.args, self.shard, model.gpu_memory, freezes_head) if self.has_head else (0, 0)
        self.head_forward, self.head_gradient = head
        self.sharded = layout.world_size > 1 or self.shard.bytes < self.shard.wide
        # Whether unreduced gradients are accumulated over micro-batches.
        self.accumulates = self.micro_batches > 1 and config.gradient_reduction != "per_microbatch"
        # Whether each gradient is freed after the update of its weight.
        self.frees_gradients = self.micro_batches == 1 and config.gradient_reduction == "step_in_backward"
        # Bytes of gradients accumulated by earlier micro-batches: in this rank's shards, and unreduced.
        self.accumulated_shards = self.accumulated_unreduced = 0
        self.layer, self.outside_layers = self.trained.largest_layer, self.trained.outside_layers
        self.first_stage_layers = max(len(self._layers(self.stages[0])), 1)
        self.hidden_states = self.shard.rows * model.args.dim * self.shard.bytes
        self.gradient_shards = masters = self.trained.local * self.shard.wide
        frozen = self.counts.local * self.shard.bytes + self.counts.quantized
        weights = (frozen, masters) if self.frozen else (masters, 0)
        self.base = MemoryEstimate(*weights, moment_bytes(config, self.trained, self.shard.wide), 0, 0, 0, 0, 0)
        if self.micro_batches > 1 and not (self.accumulates and self.sharded):
            self.accumulated_shards = self.gradient_shards
        elif self.accumulates and self.micro_batches > self.in_flight:
            self.accumulated_unreduced = self.trained.gathered * self.shard.wide

    def estimates(self) -> list[MemoryEstimate]:
        """Return the memory at each possible peak of the step."""
        estimates = [self.at_start_of_backward(second_block) for second_block in (False, True)] + [self.at_end()]
        return [*estimates, self.in_head()] if self.has_head else estimates

    # Activations

    def saved(self, stage: int) -> int:
        """Return the bytes that a stage saves for the backward pass of one micro-batch."""
        layers = enumerate(self._layers(stage), start=1)
        counts = Counter((self.model.layers[layer], self._mode(position)) for position, layer in layers)
        total = 0
        for (layer, mode), count in counts.items():
            block = self._block(layer)
            kept = {"none": block.saved, "full": block.input, "op": block.kept_by_op, "offload": 0}
            total += count * kept[mode]
        # Cosines and sines [T, D / 2], and integers of each token: ids, positions, labels, indices.
        total += self.shard.tokens * (self.model.rotated_features * self.shard.bytes + 64)
        return total + (self.hidden_states if stage < self.n_stages - 1 else 0)

    def _layers(self, stage: int) -> range:
        return range(self.model.args.n_layers) if self.plan is None else range(*self.plan.layers[stage])

    def _mode(self, position: int) -> str:
        """Return the mode (`none`, `full`, `op` or `offload`) of a stage's block; `position` counts from 1."""
        ac = self.config.activation_checkpoint
        if not ac.recomputes(position):
            return "none"
        if ac.mode == "offload" and self.model.gpu_memory is not None:
            return "offload"  # a CPU has the inputs in the same memory
        return "op" if ac.saves_ops else "full"

    def _block(self, layer: tuple[LayerSpec, LoRAMatrices]) -> BlockActivations:
        return self.model.block(layer[0], self.shard, self.config.context_parallel, layer[1])

    def _backward_working(self) -> int:
        """Return the peak of recomputed tensors and temporaries in a block's backward pass, in bytes."""
        peak = 0
        for layer in set(self.model.layers):
            block = self._block(layer)
            for mode in {self._mode(position) for position in range(1, self.model.args.n_layers + 1)}:
                forward = block.saved - block.input
                recomputed = {"none": 0, "full": forward, "op": block.recomputed_by_op, "offload": forward}[mode]
                peak = max(peak, recomputed + block.working)
        return peak

    @property
    def buffers(self) -> int:
        """Bytes of a pipeline's receive buffers: hidden states and gradients of every micro-batch."""
        inner = sum((stage > 0) + (stage < self.n_stages - 1) for stage in self.stages)
        received = sum(stage > 0 for stage in self.stages)
        # The first block's saved tensors already include the received hidden states, its input.
        return self.hidden_states * (inner * self.micro_batches - (received > 0) * self.in_flight)

    @property
    def activations(self) -> int:
        largest = max(self.saved(stage) for stage in self.stages)
        mean = sum(self.saved(stage) for stage in self.stages) // len(self.stages)
        on_device = MAX_DEVICE_INPUTS * self.hidden_states if self._mode(1) == "offload" else 0
        return (self.in_flight - 1) * mean + largest + on_device + (self.buffers if self.plan else 0)

    @property
    def host(self) -> int:
        """Bytes of offloaded block inputs in pinned host memory, which PyTorch allocates in powers of two."""
        if self._mode(1) != "offload":
            return 0
        inputs = [
            sum(_power_of_two(self._block(self.model.layers[layer]).input) for layer in self._layers(stage))
            for stage in self.stages
        ]
        return (self.in_flight - 1) * (sum(inputs) // len(inputs)) + max(inputs)

    # Points of the step at which memory can peak

    def in_head(self) -> MemoryEstimate:
        """Return memory in the forward of the head."""
        return replace(
            self.base,
            gradients=self.accumulated_shards,
            gathered=self._gathered(1),
            unreduced=self.accumulated_unreduced,
            activations=self.activations,
            head=self.head_forward,
        )

    def at_start_of_backward(self, second_block: bool) -> MemoryEstimate:
        """Return memory in the backward of the last block, or of the second-last while the last is reduced."""
        gradients, unreduced = self.accumulated_shards, self.accumulated_unreduced
        dequantized = self.counts.largest_quantized * self.shard.bytes
        if self.sharded:
            unreduced += self.layer * self.shard.bytes // 3
        elif not self.accumulates:
            unreduced += self.layer * self.shard.wide
        freed = 0
        if second_block:
            freed = min(self.saved(stage) // self.first_stage_layers for stage in self.stages)
            if self.sharded and not self.accumulates:
                unreduced += self.layer * self.shard.wide
                gradients = max(gradients, self.gradient_shards // self.model.args.n_layers)
        return replace(
            self.base,
            gradients=gradients,
            gathered=self._gathered(2),
            unreduced=unreduced,
            activations=self.activations - freed + self._backward_working() + dequantized,
            head=self.head_gradient,
        )

    def at_end(self) -> MemoryEstimate:
        """Return memory while the last gradients, of embedding and head, are reduced."""
        wide, unreduced = self.shard.wide, 0
        if self.sharded:
            unreduced = (
                (self.outside_layers + self.layer) * wide
                if self.accumulates
                else self.outside_layers * (self.shard.bytes + wide)
            )
        input_bytes = self._block(self.model.layers[0]).input
        return replace(
            self.base,
            gradients=0 if self.frees_gradients else self.gradient_shards,
            gathered=self._gathered(0),
            unreduced=unreduced,
            activations=self.saved(self.stages[0]) // self.first_stage_layers + input_bytes,
        )

    def _gathered(self, layers: int) -> int:
        """Return the bytes of gathered weights while `layers` layers are gathered."""
        if not self.sharded:
            return 0
        parts = [self.counts] if self.counts.lora is None else [self.counts, self.counts.lora]
        if self.config.reshard_after_forward == "never" or (
            self.plan is not None and self.config.reshard_after_forward != "always"
        ):
            return sum(part.gathered for part in parts) * self.shard.bytes + self.counts.quantized_gathered
        quantized = layers * self.counts.largest_quantized_layer
        return sum(part.outside_layers + layers * part.largest_layer for part in parts) * self.shard.bytes + quantized
