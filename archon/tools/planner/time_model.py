"""Predicted seconds of a training step: a roofline of matmuls and memory traffic, and latency and bandwidth of links.

    step = (n + bubble) micro-batches of the slowest stage + FSDP's traffic not overlapped with computation + optimizer

Each kind of kernel has a rate in the hardware file:

- Matmuls run at `gemm_efficiency` of the peak (of experts, at `grouped_gemm_efficiency`), or as fast as their weights
  can be read.
- Attention runs at the rate of its backend and counts Σ len² / 2.
- The head consists of matmuls and passes over the logits; all other work, of passes over memory.
- A GPU idles for `launch_s` between kernels.

The bubble is (p - 1) / v micro-batches of 1F1B with v stages per rank (Narayanan et al. 2021, arXiv:2104.04473, section
2.2).

Ranks on a CPU share processors: all work takes `Hardware.oversubscription` times as long, and while a rank waits in a
bubble, other ranks use its processor. Host time counts on a CPU, and traffic does not overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from archon.engine.memory.activations import LoRAMatrices, MicroBatchShard, block_activations
from archon.engine.memory.memory_model import WIDTHS, RankParameters
from archon.models.args.base import BaseModelArgs
from archon.models.flops import MatmulShape
from archon.models.layers.spec import NoMixer
from archon.parallel.layout import ParallelLayout
from archon.parallel.pipeline import StagePlan
from archon.parallel.resolve import context_parallel_kind
from archon.schema.config import ActivationCheckpointConfig, EngineConfig
from archon.schema.errors import ConfigError
from archon.tools.planner.hardware import Hardware

# Efficiency of attention relative to matmuls where the hardware file has no rates (Dao 2023, arXiv:2307.08691, table of
# the backward pass: 50 to 60 %), for the 12 FLOPs per query, key and feature that `archon.models.flops` counts.
ATTENTION_EFFICIENCY = 0.55
# FLOPs of an attention kernel per query, key and feature: two matmuls forward, five backward.
ATTENTION_FLOPS, ATTENTION_FORWARD_FLOPS = 14, 4
# Memory passes over each tensor of a block: a write and a read, for the tensor and for its gradient.
BLOCK_PASSES = 4
# The same on a GPU without torch.compile, where elementwise operators run one by one. Measured for Qwen3-0.6B on an
# H100: 272 ms of elementwise kernels outside the head; BLOCK_PASSES predicts 62 ms.
EAGER_PASSES = 17
# Kernels of a block, forward and backward, and of a block's forward alone. Measured for Qwen3-0.6B, compiled.
BLOCK_LAUNCHES, FORWARD_LAUNCHES = 131, 44
# Bytes moved per parameter for each all-gather of weights cast from float32 to bfloat16 (cast, copy), and for each
# reduction of their gradients (copy, cast).
GATHER_BYTES, REDUCE_BYTES = 12, 14
# Extra passes over a block's tensors and weights with FP8 matmuls: in each direction, one finds the maximum and one
# rounds. Estimated, not calibrated.
FP8_PASSES = 2
# Passes over a parameter's float32 state in AdamW and the gradient norm: weight, gradient, two moments. A fused AdamW
# makes 7, but 3.1 billion parameters took 67 ms on an H100, the time of 14.
OPTIMIZER_PASSES = 14


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tensor_parallel: float = 0.0
    """Collectives of tensor, context and expert parallelism do not overlap with computation."""
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    fsdp: float = 0.0
    """Casts, and the traffic that does not overlap with computation. `stages`: hidden states sent between stages."""
    stages: float = 0.0
    offload: float = 0.0
    """Copies of block inputs to and from host memory that computation does not hide."""
    host: float = 0.0
    """Host time that the device does not hide, and idle time between kernels."""
    bubble: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, name) for name in PARTS)

    def largest_excess(self, other: StepTime) -> str:
        """Return the part with the largest excess over `other` in seconds."""
        return max(PARTS, key=lambda name: getattr(self, name) - getattr(other, name))


PARTS = tuple(field.name for field in fields(StepTime))


@dataclass(frozen=True)
class Link:
    """Link between the ranks of a group: every `stride`-th of `size · stride` consecutive ranks."""

    hardware: Hardware
    size: int
    stride: int

    @property
    def in_node(self) -> bool:
        """Whether all ranks of the group are in one node."""
        return self.size * self.stride <= self.hardware.gpus_per_node

    @property
    def members(self) -> int:
        """Number of the group's ranks in one node."""
        return min(self.size, max(1, self.hardware.gpus_per_node // self.stride))

    def seconds(self, bytes_: float, count: float) -> float:
        """Return seconds of `count` ring all-gathers or reduce-scatters; `bytes_` is their total full size.

        Across nodes, the number of rings is the number of the group's ranks (and network adapters) in a node.
        """
        hw = self.hardware
        if self.size == 1:
            return 0.0
        bandwidth = hw.node_bandwidth if self.in_node else min(hw.node_bandwidth, hw.network_bandwidth * self.members)
        moved = bytes_ * (self.size - 1) / self.size
        return count * self._latency + moved / (bandwidth * hw.link_efficiency)

    def all_to_all_seconds(self, bytes_: float, count: float) -> float:
        """Return seconds of `count` all-to-alls; a rank sends `bytes_` in total, itself included."""
        hw = self.hardware
        if self.size == 1:
            return 0.0
        outside = 1 - self.members / self.size
        in_node = bytes_ * (self.members - 1) / self.size / hw.node_bandwidth
        return count * self._latency + max(in_node, bytes_ * outside / hw.network_bandwidth) / hw.link_efficiency

    @property
    def _latency(self) -> float:
        hw = self.hardware
        extra = hw.node_latency_per_rank_s * max(0, self.members - 2)
        return extra + (hw.node_latency_s if self.in_node else hw.network_latency_s)


Layers = tuple[tuple[int, int], ...]
"""Layers of a stage as (index of a distinct layer, number of such layers)."""


class TimeModel:
    """Step-time model of one model on one kind of hardware, in documents of `seq` tokens.

    `lora_layers` are the LoRA matrices by layer (`ModelWeights.lora_layers`); if present, all weights are frozen.
    """

    def __init__(
        self, args: BaseModelArgs, hardware: Hardware, seq: int, lora_layers: Sequence[LoRAMatrices] | None = None
    ) -> None:
        self.args, self.hardware, self.seq = args, hardware, seq
        layers = [*zip(args.layer_specs, lora_layers or [None] * args.n_layers, strict=True)]
        self.frozen = any(matrices for _, matrices in layers)
        active = [sum(matrix.active_parameters(spec.feed_forward) for matrix in lora or ()) for spec, lora in layers]
        self.flops = replace(MatmulShape.from_args(args), lora=sum(active)).per_token(seq)
        distinct = list(dict.fromkeys(zip(args.layer_specs, active, strict=True)))
        self._distinct = [spec for spec, _ in distinct]
        self._lora_parameters = [parameters for _, parameters in distinct]
        """LoRA parameters that a token uses, by layer in `_distinct`."""
        self._layers = [distinct.index(layer) for layer in zip(args.layer_specs, active, strict=True)]
        """Index in `_distinct` of each layer."""
        self._expert_layers = sum(self._distinct[index].feed_forward.n_experts > 0 for index in self._layers)
        self._stages: dict[object, StepTime] = {}
        self._distinct_ranks = lru_cache(maxsize=None)(self._count_ranks)

    def step(
        self,
        config: EngineConfig,
        layout: ParallelLayout,
        plan: StagePlan | None,
        counts: RankParameters,
        tokens: int,
        micro_batches: int,
    ) -> StepTime:
        """Return the time of a step on `micro_batches` of `tokens` tokens on each data-parallel rank.

        `counts` are the parameter counts of the largest rank.
        """
        n = micro_batches if plan is None else plan.micro_batches(micro_batches)
        ranks = self._distinct_ranks(plan)
        times = {stages: _sum([self._stage(config, layout, *stage, tokens) for stage in stages]) for stages in ranks}
        slowest = max(times.values(), key=lambda seconds: seconds.total)
        each, slowdown = slowest.total, self.hardware.oversubscription(layout.world_size)
        parts = {name: getattr(slowest, name) * n for name in PARTS}
        bubble = 0.0
        if plan is not None:
            mean = sum(times[stages].total * count for stages, count in ranks.items()) / plan.pp
            slowdown = max(1.0, slowdown * mean / each)
            # While a rank waits in a bubble, ranks on the same processors run faster, so their bubble shrinks.
            bubble = max(0.0, each * ((plan.pp - 1) / len(plan.rank_stages(0)) - n * (slowdown - 1)))
            parts["stages"] = n * self._transfers(config, layout, plan, tokens)
        parts["fsdp"] = self._fsdp(config, layout, plan, counts, n, each * n)
        parts["optimizer"] = OPTIMIZER_PASSES * (counts.trained.local * max(4, WIDTHS[config.dtype])) / self._memory
        if config.optimizer is not None and config.optimizer.kind == "muon":
            hw, stage_ranks = self.hardware, layout.world_size // layout.pp
            width = WIDTHS[config.dtype] if hw.processors else 2  # GPUs orthogonalize in bfloat16
            peak = hw.flops(config.dtype if hw.processors else "bfloat16") * hw.gemm_efficiency
            # Updates are sent to the ranks that orthogonalize them, and back.
            traffic = Link(hw, stage_ranks, 1).all_to_all_seconds(2 * counts.trained.matrices * width, 2)
            parts["optimizer"] += counts.trained.muon_flops / peak + traffic
        return StepTime(**{name: seconds * slowdown for name, seconds in parts.items()} | {"bubble": bubble})

    def _count_ranks(self, plan: StagePlan | None) -> Counter[tuple[tuple[Layers, bool], ...]]:
        """Return the number of pipeline ranks with equal stages; a stage is (layers, whether it is the last)."""
        bounds = [(0, self.args.n_layers)] if plan is None else plan.layers
        layers = [tuple(sorted(Counter(self._layers[slice(*bound)]).items())) for bound in bounds]
        stages = [(stage_layers, stage == len(layers) - 1) for stage, stage_layers in enumerate(layers)]
        ranks = [[0]] if plan is None else [plan.rank_stages(rank) for rank in range(plan.pp)]
        return Counter(tuple(stages[stage] for stage in rank_stages) for rank_stages in ranks)

    @property
    def _memory(self) -> float:
        return self.hardware.memory_bandwidth * self.hardware.memory_efficiency

    def _stage(self, config: EngineConfig, layout: ParallelLayout, layers: Layers, last: bool, tokens: int) -> StepTime:
        """Return the cached time of one micro-batch in a stage, forward and backward."""
        within = ParallelLayout(tp=layout.tp, cp=layout.cp, ep=layout.ep, etp=layout.etp)
        options = (config.dtype, config.context_parallel, config.fp8, config.attn_type, config.compile)
        key = (within, layers, last, tokens, repr(config.activation_checkpoint), *options)
        if key not in self._stages:
            self._stages[key] = self._micro_batch(config, within, layers, last, tokens)
        return self._stages[key]

    def _micro_batch(
        self, config: EngineConfig, layout: ParallelLayout, layers: Layers, last: bool, tokens: int
    ) -> StepTime:
        args, hw = self.args, self.hardware
        shard = MicroBatchShard(layout, tokens, WIDTHS[config.dtype])
        peak = hw.flops(config.dtype) * hw.gemm_efficiency
        T, b, tp, count = shard.tokens, shard.bytes, layout.tp, sum(times for _, times in layers)
        products = attention = elementwise = 0.0
        # FLOPs per parameter and token: forward and input gradient, and the weight gradient unless frozen.
        work = 4 if self.frozen else 6
        eager = config.compile is False and not hw.processors
        backend = hw.attention_backend(config.attn_type)
        dense_seconds, expert_seconds = (self._matmul_seconds(config, experts) for experts in (False, True))
        for index, times in layers:
            spec = self._distinct[index]
            active, total = spec.feed_forward.parameters(args.dim)
            span = min(self.seq, spec.mixer.window or self.seq)
            keys = span - span * span / (2 * self.seq)  # mean attended keys of a query
            rate = peak * ATTENTION_EFFICIENCY * ATTENTION_FLOPS / 12
            if backend is not None and config.dtype == "bfloat16":
                rate = hw.attention[backend].reached(keys)
            dense = T * (spec.mixer.parameters(args.dim) * dense_seconds + 6 * self._lora_parameters[index] / peak) / tp
            # Every matmul reads all of its weights: forward, input gradient, weight gradient.
            local = total / (layout.ep * layout.etp if spec.feed_forward.n_experts else tp)
            network = T * active / tp * (expert_seconds if spec.feed_forward.n_experts else dense_seconds)
            products += times * (dense + max(network, work / 2 * local * b / self._memory))
            attention += times * T * ATTENTION_FLOPS * spec.mixer.attention_width * keys / tp / rate
            block = block_activations(args.dim, spec, shard, config.context_parallel)
            elementwise += times * (EAGER_PASSES if eager else BLOCK_PASSES) * block.saved / self._memory
            rounded = block.saved + (local + spec.mixer.parameters(args.dim) / tp) * b
            elementwise += times * self._fp8_fraction(config) * FP8_PASSES * rounded / self._memory
        # Fraction of the blocks that run their forward and its collectives twice.
        recomputed = _recomputed_fraction(config.activation_checkpoint, count)
        recompute = self._recompute(config, recomputed, products, attention, elementwise)
        blocks = products + attention + elementwise
        offload = self._offload(config, count * shard.rows * args.dim * b, recompute, blocks)
        if last:
            vocab = 1 if args.is_critic else args.vocab_size
            products += work * T * args.dim * vocab / tp / peak
            elementwise += hw.head_passes * T * vocab / tp * b / self._memory
        launches = count * (BLOCK_LAUNCHES + recomputed * FORWARD_LAUNCHES)
        repeated = 1 + recomputed / 2
        hidden = T * args.dim * b
        return StepTime(
            products,
            attention,
            elementwise,
            recompute,
            Link(hw, tp, 1).seconds(8 * count * hidden, 8 * count) * repeated,
            self._context_parallel(config, layout, shard, layers) * repeated,
            self._expert_parallel(layout, shard, layers) * repeated,
            offload=offload,
            host=count * hw.layer_overhead_s * (1 + recomputed / 3)
            + last * hw.micro_batch_overhead_s
            + launches * hw.launch_s,
        )

    def _matmul_seconds(self, config: EngineConfig, experts: bool) -> float:
        """Return the matmul seconds of one parameter and one token: forward, input gradient, weight gradient.

        Frozen weights have no weight gradient. It is in FP8 only in the `tensorwise` recipe, never for experts. Every
        block has the mean time of FP8 and other blocks; the first and last stages of a pipeline are in fact slower.
        """
        hw, share = self.hardware, self._fp8_fraction(config)
        efficiency = (hw.grouped_gemm_efficiency if experts else None) or hw.gemm_efficiency
        wide = narrow = 1 / (hw.flops(config.dtype) * efficiency)
        if share:
            narrow = 1 / (hw.matmul_flops(config.dtype, config.fp8) * (hw.fp8_efficiency or hw.gemm_efficiency))
        mean = share * narrow + (1 - share) * wide
        weight_gradient = mean if config.fp8_recipe == "tensorwise" and not experts else wide
        return 4 * mean + (0 if self.frozen else 2 * weight_gradient)

    def _fp8_fraction(self, config: EngineConfig) -> float:
        return len(config.fp8_blocks(self.args.n_layers)) / self.args.n_layers

    def _transfers(self, config: EngineConfig, layout: ParallelLayout, plan: StagePlan, tokens: int) -> float:
        """Return the non-overlapped seconds of sending a micro-batch's hidden states and gradients between stages."""
        hidden = MicroBatchShard(layout, tokens, WIDTHS[config.dtype]).rows * self.args.dim * WIDTHS[config.dtype]
        link, passes = Link(self.hardware, 2, layout.world_size // layout.pp), 2 * len(plan.rank_stages(0))
        # Sending one tensor costs the same as an all-gather of two tensors by two ranks.
        return (1 - self.hardware.overlap) * link.seconds(2 * hidden * passes, passes)

    def _recompute(
        self, config: EngineConfig, recomputed: float, products: float, attention: float, elementwise: float
    ) -> float:
        """Return the seconds of the forwards of recomputed blocks; `op` recomputes no matmuls."""
        if config.activation_checkpoint.saves_ops:
            return elementwise / 4
        attention *= ATTENTION_FORWARD_FLOPS / ATTENTION_FLOPS
        return recomputed * (products / (2 if self.frozen else 3) + attention + elementwise / 4)

    def _offload(self, config: EngineConfig, inputs: int, forward: float, blocks: float) -> float:
        """Return the seconds of copying `inputs` bytes out and back that the blocks do not hide.

        Copies to the host run during the forward pass of `forward` seconds, copies back during the backward pass, which
        repeats the forward. `blocks` are the seconds of both passes without the repetition. A CPU copies within
        its memory.
        """
        hw = self.hardware
        if config.activation_checkpoint.mode != "offload":
            return 0.0
        if hw.processors:
            return 4 * inputs / self._memory
        if not hw.host_bandwidth:
            raise ConfigError(
                f"activation_checkpoint.mode = offload needs the bandwidth between GPU and host, and host_bandwidth of "
                f"{hw.name} is 0; set it, or choose full"
            )
        copy = inputs / (hw.host_bandwidth * hw.link_efficiency)
        return max(0.0, copy - forward) + max(0.0, copy - blocks)

    def _context_parallel(
        self, config: EngineConfig, layout: ParallelLayout, shard: MicroBatchShard, layers: Layers
    ) -> float:
        link, seconds = Link(self.hardware, layout.cp, layout.tp), 0.0
        if layout.cp == 1:
            return seconds
        for index, times in layers:
            mixer = self._distinct[index].mixer
            if isinstance(mixer, NoMixer):
                continue
            kind = context_parallel_kind(config.context_parallel, layout.cp, layout.tp, *mixer.heads)
            if kind == "allgather":
                # An all-gather of keys and values (the contents of a cache), and a reduce-scatter of their gradient.
                gathered = times * shard.tokens * mixer.cache.local_features(layout.tp) * shard.bytes
                seconds += link.seconds(2 * gathered * layout.cp, 2 * times)
            else:
                # All-to-alls of queries, keys, values, outputs and their gradients.
                sent = times * shard.tokens * mixer.ulysses_bytes(layout.tp, layout.cp, shard.bytes)
                seconds += link.all_to_all_seconds(2 * sent, 8 * times)
        return seconds

    def _expert_parallel(self, layout: ParallelLayout, shard: MicroBatchShard, layers: Layers) -> float:
        networks = [(self._distinct[index].feed_forward, times) for index, times in layers]
        sparse = sum(times for network, times in networks if network.n_experts)
        dim = self.args.dim
        features = sum(times * network.expert_dim(dim) for network, times in networks if network.n_experts)
        chosen = sum(times * network.expert_dim(dim) * network.top_k for network, times in networks)
        sent = 4 * chosen * shard.rows * layout.etp * shard.bytes
        gathered = 4 * features * shard.rows * layout.etp * shard.bytes
        inner = Link(self.hardware, layout.etp, 1).seconds(gathered, 4 * sparse)
        return inner + Link(self.hardware, layout.ep, layout.etp).all_to_all_seconds(sent, 6 * sparse)

    def _fsdp(
        self,
        config: EngineConfig,
        layout: ParallelLayout,
        plan: StagePlan | None,
        counts: RankParameters,
        n: int,
        compute_seconds: float,
    ) -> float:
        """Return the non-overlapped seconds of gathering weights and reducing gradients, and of their casts."""
        b, wide = WIDTHS[config.dtype], max(4, WIDTHS[config.dtype])
        keeps_gathered = plan is not None or config.reshard_after_forward == "never"
        gathers = 1 if keeps_gathered else 2 * n
        reduces = 1 if config.gradient_reduction == "per_step" else n
        pp, within = layout.pp, layout.ep * layout.etp
        blocks = self.args.n_layers / pp
        sparse = self._expert_layers / pp
        trained, times = counts.trained, gathers + reduces
        parts = [counts] if counts.lora is None else [counts, counts.lora]
        dense = sum(part.gathered - part.experts for part in parts) * gathers * b
        dense += counts.quantized_gathered * gathers + (trained.gathered - trained.experts) * reduces * wide
        experts = sum(part.experts for part in parts) * gathers * b + trained.experts * reduces * wide
        link = Link(self.hardware, layout.dp_shard * layout.cp, layout.tp)
        traffic = link.seconds(dense, blocks * times)
        expert_link = Link(self.hardware, layout.dp_shard * layout.cp * layout.tp // within, within)
        traffic += expert_link.seconds(experts, sparse * times)
        replicas = Link(self.hardware, layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard)
        traffic += 2 * reduces * replicas.seconds(trained.local * wide, blocks)
        casts = 0.0
        if b < wide:
            casts = trained.gathered * (gathers * GATHER_BYTES + reduces * REDUCE_BYTES) / self._memory
        if layout.world_size > 1:
            traffic += self.hardware.shard_overhead_s * (blocks + sparse) * times
        # A pipeline has all traffic at the start and the end of a step, other layouts in each micro-batch that gathers.
        overlapped = 0.0 if plan is not None else compute_seconds / n if keeps_gathered else compute_seconds
        first = traffic / max(blocks, 1) / max(times, 1)
        return casts + max(traffic - self.hardware.overlap * overlapped, first if traffic else 0.0)


def _recomputed_fraction(ac: ActivationCheckpointConfig, blocks: int) -> float:
    """Return the fraction of a stage's `blocks` blocks that are recomputed."""
    return sum(ac.recomputes(position) for position in range(1, blocks + 1)) / blocks if blocks else 0.0


def _sum(parts: list[StepTime]) -> StepTime:
    if len(parts) == 1:
        return parts[0]
    return StepTime(**{name: sum(getattr(part, name) for part in parts) for name in PARTS})
