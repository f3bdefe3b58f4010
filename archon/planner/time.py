"""Seconds of a training step: products and memory traffic by their roofline, collectives by latency and bandwidth.

    step = (n + bubble) micro-batches of the slowest stage + what of FSDP's traffic no computation hides + optimiser

Products run at `gemm_efficiency` of the peak, or as fast as their weights can be read; attention counts Σ len² / 2. The
bubble is (p - 1) / v micro-batches of 1F1B with v stages a rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

Ranks that share processors, as those of a CPU do, take `crowding` times as long for everything, and a rank that waits
in a bubble leaves its share to the others. On a CPU the host's own time counts too, and no traffic is hidden.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from archon.models.args import BaseModelArgs
from archon.models.flops import MatmulShape
from archon.parallel.constraints import context_parallel_kind
from archon.parallel.layout import ParallelLayout
from archon.parallel.pipeline import StagePlan
from archon.planner.activations import BlockSizes, Share, block_of
from archon.planner.hardware import Hardware
from archon.planner.memory import WIDTHS, State
from archon.schema.config import ActivationCheckpointConfig, EngineConfig

# Attention's share of the efficiency of plain products: softmax and recomputed scores between smaller products (Dao
# 2023, arXiv:2307.08691, table of the backward pass: 50 to 60 % of what products reach).
ATTENTION = 0.55
# Times that each tensor of a block passes through the memory: written, read, and as much for its gradient.
PASSES = 4
# Float32 numbers of a parameter that AdamW and the gradient's norm read and write: weight, gradient, two moments.
OPTIMISER_PASSES = 8
# Passes over a float32 tile of logits and its gradient in the head.
TILE_PASSES = 6


@dataclass(frozen=True)
class Seconds:
    """Where a step's time goes; `fsdp` and `stages`, hidden states between them, are what computation does not hide;
    `host` is what the host takes before it has given out work."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    fsdp: float = 0.0
    stages: float = 0.0
    host: float = 0.0
    bubble: float = 0.0
    optimiser: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def longest_beyond(self, other: Seconds) -> str:
        """The part in which this step loses most against another."""
        return max((f.name for f in fields(self)), key=lambda name: getattr(self, name) - getattr(other, name))


@dataclass(frozen=True)
class Link:
    """What joins a group of ranks: every `stride`-th of `size · stride` neighbours."""

    hardware: Hardware
    size: int
    stride: int

    @property
    def in_node(self) -> bool:
        return self.size * self.stride <= self.hardware.gpus_per_node

    @property
    def members(self) -> int:
        """Ranks of the group in one node."""
        return min(self.size, max(1, self.hardware.gpus_per_node // self.stride))

    def seconds(self, bytes_: float, count: float) -> float:
        """`count` gathers or reduce-scatters of whole tensors of `bytes_` in all, by rings.

        Across nodes as many rings run as the group has ranks, and thus network adapters, in a node.
        """
        hw = self.hardware
        if self.size == 1:
            return 0.0
        bandwidth = hw.node_bandwidth if self.in_node else min(hw.node_bandwidth, hw.network_bandwidth * self.members)
        moved = bytes_ * (self.size - 1) / self.size
        return count * self._latency + moved / (bandwidth * hw.link_efficiency)

    def exchange(self, bytes_: float, count: float) -> float:
        """`count` all-to-alls in which a rank sends `bytes_` in all, its own share included."""
        hw = self.hardware
        if self.size == 1:
            return 0.0
        away = 1 - self.members / self.size
        here = bytes_ * (self.members - 1) / self.size / hw.node_bandwidth
        return count * self._latency + max(here, bytes_ * away / hw.network_bandwidth) / hw.link_efficiency

    @property
    def _latency(self) -> float:
        hw = self.hardware
        more = hw.node_latency_per_rank_s * max(0, self.members - 2)
        return more + (hw.node_latency_s if self.in_node else hw.network_latency_s)


Layers = tuple[tuple[tuple[int, int, float], int], ...]
"""Kinds of layers, and how many of each a stage has."""


class TimeModel:
    """Foretells steps of one model on one kind of hardware, in documents of `seq` tokens."""

    def __init__(self, args: BaseModelArgs, hardware: Hardware, seq: int) -> None:
        self.args, self.hardware, self.seq = args, hardware, seq
        self.flops = MatmulShape.from_args(args).per_token(seq)
        width = args.n_heads * args.head_dim
        self._attention = args.dim * (2 * width + 2 * args.n_kv_heads * args.head_dim)
        self._sizes = BlockSizes.of(args)
        networks = [args.feed_forward_parameters(layer) for layer in range(args.n_layers)]
        reaches = (min(seq, window or seq) for window in args.layer_windows)
        causal = [12 * width * (reach - reach * reach / (2 * seq)) for reach in reaches]
        self._layers = [(met, every, flops) for (met, every), flops in zip(networks, causal, strict=True)]
        """Of each layer: parameters of its network that a token meets and all, and attention's FLOPs a token."""
        self._stages: dict[object, Seconds] = {}
        self._different: dict[StagePlan | None, Counter[tuple[tuple[Layers, bool], ...]]] = {}

    def step(
        self,
        config: EngineConfig,
        layout: ParallelLayout,
        plan: StagePlan | None,
        state: State,
        tokens: int,
        micro_batches: int,
    ) -> Seconds:
        """A step on `micro_batches` of `tokens` on each data-parallel rank; `state` is what its fullest rank holds."""
        n = micro_batches if plan is None else plan.micro_batches(micro_batches)
        ranks = self._ranks(plan)
        sums = {own: _sum([self._stage(config, layout, *stage, tokens) for stage in own]) for own in ranks}
        slowest = max(sums.values(), key=lambda seconds: seconds.total)
        each, crowding = slowest.total, self.hardware.crowding(layout.world_size)
        found = {f.name: getattr(slowest, f.name) * n for f in fields(Seconds)}
        bubble = 0.0
        if plan is not None:
            mean = sum(sums[own].total * times for own, times in ranks.items()) / plan.pp
            crowding = max(1.0, crowding * mean / each)
            # Crowded ranks have less of a bubble, or none: while one waits the others are faster.
            bubble = max(0.0, each * ((plan.pp - 1) / len(plan.stages_of(0)) - n * (crowding - 1)))
            found["stages"] = n * self._transfers(config, layout, plan, tokens)
        found["fsdp"] = self._fsdp(config, layout, plan, state, n, each * n)
        own = state.own * max(4, WIDTHS[config.dtype])
        found["optimiser"] = OPTIMISER_PASSES * own / self._memory
        return Seconds(
            **{name: seconds * crowding for name, seconds in found.items() if name != "bubble"}, bubble=bubble
        )

    def _ranks(self, plan: StagePlan | None) -> Counter[tuple[tuple[Layers, bool], ...]]:
        """The ranks of a pipeline that differ, and how many are so: of each stage its layers, and whether it is the
        last."""
        if plan not in self._different:
            stages = [range(self.args.n_layers)] if plan is None else [range(*bounds) for bounds in plan.layers]
            kinds = [tuple(sorted(Counter(self._layers[layer] for layer in stage).items())) for stage in stages]
            ranks = [[0]] if plan is None else [plan.stages_of(rank) for rank in range(plan.pp)]
            self._different[plan] = Counter(
                tuple((kinds[stage], stage == len(stages) - 1) for stage in own) for own in ranks
            )
        return self._different[plan]

    @property
    def _memory(self) -> float:
        return self.hardware.memory_bandwidth * self.hardware.memory_efficiency

    def _stage(self, config: EngineConfig, layout: ParallelLayout, layers: Layers, last: bool, tokens: int) -> Seconds:
        """One micro-batch forward and backward through a stage; remembered, since most stages are alike."""
        within = ParallelLayout(tp=layout.tp, cp=layout.cp, ep=layout.ep, etp=layout.etp)
        ac = config.activation_checkpoint
        key = (within, layers, last, tokens, ac.mode, ac.selective, config.dtype, config.context_parallel)
        if key not in self._stages:
            self._stages[key] = self._micro_batch(config, within, layers, last, tokens)
        return self._stages[key]

    def _micro_batch(
        self, config: EngineConfig, layout: ParallelLayout, layers: Layers, last: bool, tokens: int
    ) -> Seconds:
        args, hw = self.args, self.hardware
        share = Share(layout, tokens, WIDTHS[config.dtype])
        peak = hw.flops(config.dtype) * hw.gemm_efficiency
        T, b, tp, count = share.tokens, share.bytes, layout.tp, sum(times for _, times in layers)
        products = attention = elementwise = 0.0
        for (met, every, causal), times in layers:
            dense = 6 * T * self._attention / tp / peak
            # Every product reads its weights whole: forward, and for the gradients of inputs and of weights.
            held = every / (tp if every == met else layout.ep * layout.etp)
            products += times * (dense + max(6 * T * met / tp / peak, 3 * held * b / self._memory))
            attention += times * T * causal / tp / (peak * ATTENTION)
            block = block_of(self._sizes, met != every, share, config.context_parallel)
            elementwise += times * PASSES * block.saved / self._memory
        recompute = self._recompute(config, products, attention, elementwise)
        if last:
            vocab = 1 if args.is_critic else args.vocab_size
            products += 6 * T * args.dim * vocab / tp / peak
            elementwise += TILE_PASSES * T * vocab / tp * share.wide / self._memory
        ac = config.activation_checkpoint
        # The share of the blocks whose forward, and what it sends, comes twice.
        twice = 0.0 if ac.mode == "none" else 1 / _every(ac)
        again = 1 + twice / 2
        stream = T * args.dim * b
        return Seconds(
            products,
            attention,
            elementwise,
            recompute,
            Link(hw, tp, 1).seconds(8 * count * stream, 8 * count) * again,
            self._context(config, layout, share, count) * again,
            self._experts(layout, share, layers) * again,
            host=count * hw.layer_overhead_s * (1 + twice / 3) + last * hw.micro_batch_overhead_s,
        )

    def _transfers(self, config: EngineConfig, layout: ParallelLayout, plan: StagePlan, tokens: int) -> float:
        """What of a micro-batch's hidden states and their gradients, to and from the next stages, is not hidden."""
        stream = Share(layout, tokens, WIDTHS[config.dtype]).rows * self.args.dim * WIDTHS[config.dtype]
        link, passes = Link(self.hardware, 2, layout.world_size // layout.pp), 2 * len(plan.stages_of(0))
        # A pair's gather of two such tensors sends one of them.
        return (1 - self.hardware.overlap) * link.seconds(2 * stream * passes, passes)

    def _recompute(self, config: EngineConfig, products: float, attention: float, elementwise: float) -> float:
        """A third of what is computed again: the forward; products and attention are not, where their results stay."""
        ac = config.activation_checkpoint
        if ac.mode == "none":
            return 0.0
        if ac.mode == "selective" and ac.selective == "op":
            return elementwise / 4
        return ((products + attention) / 3 + elementwise / 4) / _every(ac)

    def _context(self, config: EngineConfig, layout: ParallelLayout, share: Share, layers: int) -> float:
        args, link = self.args, Link(self.hardware, layout.cp, layout.tp)
        heads, key_heads = args.n_heads // layout.tp, max(1, args.n_kv_heads // layout.tp)
        row = 2 * layers * share.tokens * args.head_dim * share.bytes
        kind = context_parallel_kind(config.context_parallel, layout.cp, layout.tp, args.n_heads, args.n_kv_heads)
        if kind == "allgather":
            # Keys and values gathered in one, and their gradients summed to their ranks.
            return link.seconds(2 * row * layout.cp * key_heads, 2 * layers)
        # Queries, keys, values and results swapped, and their gradients.
        return link.exchange(row * 2 * (heads + max(key_heads, layout.cp)), 8 * layers)

    def _experts(self, layout: ParallelLayout, share: Share, layers: Layers) -> float:
        sparse = sum(times for (met, every, _), times in layers if met != every)
        chosen = getattr(self.args, "n_experts_per_token", 0)
        rows = share.rows * layout.etp * chosen
        sent = 4 * sparse * rows * self.args.dim * share.bytes
        gathered = 4 * sparse * share.rows * layout.etp * self.args.dim * share.bytes
        inner = Link(self.hardware, layout.etp, 1).seconds(gathered, 4 * sparse)
        return inner + Link(self.hardware, layout.ep, layout.etp).exchange(sent, 6 * sparse)

    def _fsdp(
        self,
        config: EngineConfig,
        layout: ParallelLayout,
        plan: StagePlan | None,
        state: State,
        n: int,
        computed: float,
    ) -> float:
        """What of gathering weights and sharing out gradients outlasts the computation beside it."""
        b, wide = WIDTHS[config.dtype], max(4, WIDTHS[config.dtype])
        keeps = plan is not None or config.reshard_after_forward == "never"
        gathers = 1 if keeps else 2 * n
        reduces = 1 if config.gradient_reduction == "per_step" else n
        pp, within = layout.pp, layout.ep * layout.etp
        blocks = self.args.n_layers / pp
        sparse = sum(met != every for met, every, _ in self._layers) / pp
        each, times = gathers * b + reduces * wide, gathers + reduces
        link = Link(self.hardware, layout.dp_shard * layout.cp, layout.tp)
        traffic = link.seconds((state.gathered - state.experts) * each, blocks * times)
        own = Link(self.hardware, layout.dp_shard * layout.cp * layout.tp // within, within)
        traffic += own.seconds(state.experts * each, sparse * times)
        replicas = Link(self.hardware, layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard)
        traffic += 2 * reduces * replicas.seconds(state.own * wide, blocks)
        if layout.world_size > 1:
            traffic += self.hardware.shard_overhead_s * (blocks + sparse) * times
        # With a pipeline all of it lies at the two ends of a step; else in every micro-batch that has some.
        beside = 0.0 if plan is not None else computed if not keeps else computed / n
        first = traffic / max(blocks, 1) / max(times, 1)
        return max(traffic - self.hardware.overlap * beside, first if traffic else 0.0)


def _every(ac: ActivationCheckpointConfig) -> int:
    """One in how many blocks is computed again."""
    return ac.selective if ac.mode == "selective" and isinstance(ac.selective, int) else 1


def _sum(parts: list[Seconds]) -> Seconds:
    return Seconds(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(Seconds)})
