"""Legal layouts of so many GPUs × micro-batches × recompute policies: which fit, and which of those is fastest.

Seconds are found first, for all; memory only from the fastest on, until enough layouts fit. So the layouts whose memory
is asked for are those that win and those that would, if they fitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from archon.models.args import BaseModelArgs
from archon.models.attention.registry import attends_gathered
from archon.models.flops import Flops
from archon.models.spec import ModelSpec
from archon.parallel.constraints import violation
from archon.parallel.layout import ParallelLayout, parse_layout
from archon.parallel.pipeline import StagePlan
from archon.parallel.resolve import resolve_layout
from archon.planner.hardware import Hardware
from archon.planner.memory import WIDTHS, Memory, MemoryModel, State, candidate_ranks, state_of
from archon.planner.time import Seconds, TimeModel
from archon.planner.weights import ModelWeights
from archon.schema.config import ActivationCheckpointConfig, EngineConfig
from archon.schema.errors import UserError

POLICIES: tuple[dict[str, Any], ...] = (
    {"mode": "none"},
    {"mode": "selective", "selective": "op"},
    {"mode": "selective", "selective": 2},
    {"mode": "full"},
)
# A context degree beyond this, or a micro-batch, is left to those who ask for it.
MAX_CONTEXT, MAX_PACK = 16, 131072
# What is legal and left out, since it seldom wins.
NOT_TRIED = (
    f"t beyond a node, c beyond {MAX_CONTEXT}, replicas of less than a node, zero-bubble schedules, stages by hand or "
    "more than 2 a rank, selective beyond every second layer, memory_budget, cpu_offload, reshard_after_forward, a "
    f"context_parallel but auto, micro-batches of other than 2ⁿ documents or beyond {MAX_PACK:,} tokens"
)


class Question(NamedTuple):
    """What is asked: `tokens` of an optimiser step over all GPUs, in documents of `seq` tokens."""

    path: str
    gpus: int
    tokens: int
    seq: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Candidate:
    """One way to train. `tokens` are those of a micro-batch, `micro_batches` of a step on each data-parallel rank."""

    layout: ParallelLayout
    options: dict[str, Any] = field(hash=False)
    tokens: int
    micro_batches: int
    seconds: Seconds

    @property
    def policy(self) -> str:
        """The recompute policy, in a word or two."""
        return ActivationCheckpointConfig.model_validate(self.options["activation_checkpoint"]).name

    def key(self) -> tuple[object, ...]:
        """Candidates of one key are the same layout, differently run."""
        return self.layout, self.options.get("pipeline", {}).get("schedule")


@dataclass(frozen=True)
class Placed:
    """A candidate with its memory; `spare` bytes are left, or lacking where negative."""

    candidate: Candidate
    memory: Memory
    spare: int


@dataclass
class LeftOut:
    """What a search met and did not propose: layouts, each schedule of a pipeline counted, whose masters, gradients and
    moments leave no room (`overfull`) or whose ranks and stages too few documents keep busy (`idle`); candidates that
    fit and that the engine does not take, by its message."""

    overfull: int = 0
    idle: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Plan:
    """The best that fit, fastest first, and faster ones that do not. `closest` lacks the least, where none fits."""

    question: Question
    hardware: Hardware
    flops: Flops
    best: list[Placed]
    too_large: list[Placed]
    considered: int
    closest: Placed | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    positions: int = 1 << 62
    """Of the longest document that the model was made for."""


class Planner:
    """Plans for one model on one kind of hardware. UserError for a question that no layout answers."""

    def __init__(self, spec: ModelSpec, args: BaseModelArgs, hardware: Hardware) -> None:
        self.args, self.hardware = args, hardware
        self.weights = ModelWeights.of(spec, args)
        # Only ranks on a CPU share processors.
        self.memory = MemoryModel(args, self.weights, "cpu" if hardware.processors else "cuda")
        self._configs: dict[str, EngineConfig] = {}

    def plan(self, question: Question, best: int = 10, near: int = 5) -> Plan:
        """The `best` layouts for the question, and up to `near` that would be faster and do not fit."""
        if question.tokens < question.seq:
            raise UserError(
                f"tokens is {question.tokens}, which holds no document of seq = {question.seq}; raise tokens"
            )
        times = TimeModel(self.args, self.hardware, question.seq)
        left_out = LeftOut()
        candidates = sorted(self.candidates(question, times, left_out), key=lambda c: c.seconds.total)
        found: dict[object, Placed] = {}
        missed: dict[object, Placed] = {}
        closest: Placed | None = None
        for candidate in candidates:
            if len(found) == best:
                break
            if candidate.key() in found:
                continue
            placed = self.place(question, candidate)
            if placed.spare < 0:
                missed.setdefault(candidate.key(), placed)
                if closest is None or placed.spare > closest.spare:
                    closest = placed
            elif refusal := self._refusal(question, candidate):
                left_out.refused[refusal] += 1
            else:
                found[candidate.key()] = placed
        too_large = [placed for key, placed in missed.items() if key not in found][:near]
        best_ones, considered = list(found.values()), len(candidates)
        positions = self.args.max_seq_len
        return Plan(
            question, self.hardware, times.flops, best_ones, too_large, considered, closest, left_out, positions
        )

    def config(self, question: Question, candidate: Candidate) -> EngineConfig:
        """The engine's configuration of a candidate."""
        return self._config(question, str(candidate.layout), candidate.options, candidate.tokens)

    def place(self, question: Question, candidate: Candidate) -> Placed:
        """A candidate's memory on its fullest rank, and what is left of the GPU's."""
        config = self._config(question, "d1", candidate.options, candidate.tokens)
        memory = self.memory.fullest(config, candidate.layout, candidate.tokens, candidate.micro_batches)
        hw = self.hardware
        taken = memory.total + hw.reserve_bytes + hw.fragmentation * memory.step
        return Placed(candidate, memory, int(hw.memory_bytes - taken))

    def seconds(self, config: EngineConfig, seq: int, documents: int) -> Seconds:
        """A step of a configuration as it stands, on `documents` of `seq` tokens over all ranks."""
        layout = parse_layout(config.layout)
        plan = self.memory.plan(config, layout)
        own = -(-documents // layout.dp)
        packed = min(own, max(1, config.max_tokens_per_mb // seq))
        state = self._fullest_state(layout, plan)
        return TimeModel(self.args, self.hardware, seq).step(
            config, layout, plan, state, packed * seq, -(-own // packed)
        )

    def candidates(self, question: Question, times: TimeModel, left_out: LeftOut) -> Iterator[Candidate]:
        """All that are tried and whose masters and moments leave room for anything else; counts the layouts of none."""
        hw, wide = self.hardware, max(4, WIDTHS[question.dtype])
        for layout in layouts(self.args, question.gpus, hw.gpus_per_node):
            for pipeline in self._pipelines(layout):
                options: dict[str, Any] = {"pipeline": pipeline} if pipeline else {}
                base = self._config(question, "d1", options, question.seq)
                plan = self.memory.plan(base, layout)
                state = self._fullest_state(layout, plan)
                if 4 * wide * state.own + hw.reserve_bytes > hw.memory_bytes:
                    left_out.overfull += 1
                    continue
                sizes = list(micro_batches(question, layout))
                left_out.idle += not sizes
                for tokens, n in sizes:
                    for policy in POLICIES:
                        for reduction in ("per_step", "per_microbatch") if n > 1 and plan is None else ("per_step",):
                            own = options | {"activation_checkpoint": policy, "gradient_reduction": reduction}
                            config = self._config(question, "d1", own, tokens)
                            seconds = times.step(config, layout, plan, state, tokens, n)
                            yield Candidate(layout, own, tokens, n, seconds)

    def _pipelines(self, layout: ParallelLayout) -> list[dict[str, Any]]:
        if layout.pp == 1:
            return [{}]
        interleaved: list[dict[str, Any]] = []
        if self.args.n_layers >= 2 * layout.pp:
            interleaved = [{"schedule": "interleaved_1f1b", "stages_per_rank": 2}]
        return [{"schedule": "1f1b"}, *interleaved]

    def _fullest_state(self, layout: ParallelLayout, plan: StagePlan | None) -> State:
        states = (state_of(self.weights, layout, plan, rank) for rank in candidate_ranks(layout, plan))
        return max(states, key=lambda state: state.own)

    def _config(self, question: Question, layout: str, options: dict[str, Any], tokens: int) -> EngineConfig:
        key = repr((question, layout, options, tokens))
        if key not in self._configs:
            fields = {"path": question.path, "dtype": question.dtype, "layout": layout, "max_tokens_per_mb": tokens}
            self._configs[key] = EngineConfig.model_validate(fields | options)
        return self._configs[key]

    def _refusal(self, question: Question, candidate: Candidate) -> str:
        """Why the engine would not take it; nothing where it would."""
        config = self.config(question, candidate)
        try:
            resolve_layout(config, self.args.sizes, "cuda", attends_gathered=attends_gathered(config.attn_type))
        except UserError as error:
            return str(error)
        return ""


def micro_batches(question: Question, layout: ParallelLayout) -> Iterator[tuple[int, int]]:
    """(tokens of a micro-batch, micro-batches of a step) that give every rank whole documents and a pipeline enough."""
    whole = question.tokens // question.seq
    if whole < layout.dp:
        return
    documents = -(-whole // layout.dp)  # of the rank that has most: the others wait for it
    packed = 1
    while packed <= documents and packed * question.seq <= max(MAX_PACK, question.seq):
        n = -(-documents // packed)
        if layout.pp == 1 or n >= layout.pp:
            yield packed * question.seq, n
        packed *= 2


def layouts(args: BaseModelArgs, gpus: int, gpus_per_node: int) -> Iterator[ParallelLayout]:
    """Legal layouts of `gpus` ranks that can win: tensor parallelism stays within a node, and replicas begin where a
    sharded model fills a node at least."""
    node = min(gpus, gpus_per_node)
    expert_degrees = _divisors(args.sizes.experts) if args.sizes.experts else [1]
    for tp, pp in product(_divisors(gpus), repeat=2):
        if tp > node or pp > args.n_layers or gpus % (tp * pp):
            continue
        for cp, replicas in product(_divisors(gpus // (tp * pp)), repeat=2):
            rest = gpus // (tp * pp) // cp
            if cp > MAX_CONTEXT or rest % replicas:
                continue
            shard = rest // replicas
            if replicas > 1 and shard * cp * tp < node:
                continue
            for etp in sorted({1, tp}):
                lender = shard * cp * (tp if etp == 1 else 1)
                for ep in expert_degrees:
                    if lender % ep or (etp > 1 and not args.sizes.experts):
                        continue
                    layout = ParallelLayout(shard, replicas, pp, tp, cp, ep, etp)
                    if violation(layout, args.sizes) is None:
                        yield layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
