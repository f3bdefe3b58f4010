"""Search of legal layouts × micro-batches × recompute policies for the fastest ones that fit the GPUs' memory.

It predicts the time of all candidates, then the memory from the fastest on, until enough layouts fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from archon.engine.memory.activations import is_shared, kinds_without_formula
from archon.engine.memory.memory_model import (
    MemoryEstimate,
    MemoryModel,
    RankParameters,
    candidate_ranks,
    rank_parameters,
)
from archon.engine.memory.recompute import choose_recompute
from archon.engine.memory.weight_shards import ModelWeights
from archon.models.args.base import BaseModelArgs
from archon.models.attention.registry import supports_gathered
from archon.models.flops import Flops
from archon.models.lora.quantized_base import BaseFormat
from archon.models.lora.targets import LoRASize
from archon.models.spec import ModelSpec
from archon.parallel.layout import ParallelLayout, parse_layout
from archon.parallel.pipeline import StagePlan
from archon.parallel.resolve import find_violation, resolve_layout
from archon.schema.config import ActivationCheckpointConfig, EngineConfig
from archon.schema.errors import UserError
from archon.tools.planner.hardware import Hardware
from archon.tools.planner.time_model import StepTime, TimeModel

POLICIES: tuple[dict[str, Any], ...] = (
    {"mode": "none"},
    {"mode": "selective", "selective": "op"},
    {"mode": "selective", "selective": 2},
    {"mode": "full"},
)
# Maximum context-parallel degree and maximum tokens of a micro-batch in the search.
MAX_CONTEXT, MAX_PACK = 16, 131072
# Legal choices that are seldom the fastest.
UNSEARCHED_NOTE = (
    f"t beyond a node, c beyond {MAX_CONTEXT}, replicas of less than a node, zero-bubble schedules, manual stages or "
    "more than 2 a rank, selective beyond every second layer, memory_budget, offload, cpu_offload, "
    "reshard_after_forward, a context_parallel other than auto, micro-batches of other than 2ⁿ documents or beyond "
    f"{MAX_PACK:,} tokens"
)


class PlanRequest(NamedTuple):
    """Model, and tokens of an optimizer step over all GPUs in documents of `seq` tokens.

    `lora` has the fields of `model.lora`; None trains all weights.
    """

    path: str
    gpus: int
    tokens: int
    seq: int
    dtype: str = "bfloat16"
    lora: dict[str, Any] | None = None
    fp8: str = "none"


@dataclass(frozen=True)
class Candidate:
    """Layout with its options; `tokens` is per micro-batch, `micro_batches` per step and data-parallel rank."""

    layout: ParallelLayout
    options: dict[str, Any] = field(hash=False)
    tokens: int
    micro_batches: int
    seconds: StepTime

    @property
    def policy(self) -> str:
        """Name of the recompute policy."""
        return ActivationCheckpointConfig.model_validate(self.options["activation_checkpoint"]).name

    @property
    def schedule(self) -> str:
        """Pipeline schedule, or a dash."""
        return str(self.options.get("pipeline", {}).get("schedule", "-"))

    @property
    def key(self) -> tuple[ParallelLayout, str]:
        """Layout and pipeline schedule; a plan has one candidate per key."""
        return self.layout, self.schedule


@dataclass(frozen=True)
class CandidateFit:
    """Candidate with its predicted memory; `headroom` is the free bytes, negative if it does not fit."""

    candidate: Candidate
    memory: MemoryEstimate
    headroom: int


@dataclass
class Rejections:
    """Counts of rejected layouts and candidates.

    Attributes:
        exceeds_memory: layouts × schedules with masters, gradients and moments larger than the memory.
        idle: layouts × schedules with too few documents for all ranks and stages.
        refused: candidates that fit but that the engine rejects, by its error.
        unknown: layouts with t, c or e that are skipped because a kind of layer has no memory formula.
    """

    exceeds_memory: int = 0
    idle: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unknown: int = 0


@dataclass(frozen=True)
class Plan:
    """Best candidates that fit, fastest first, and faster ones that do not.

    `closest` is the candidate that lacks the least memory. `max_positions` is the model's maximum document length in
    tokens.
    """

    request: PlanRequest
    hardware: Hardware
    flops: Flops
    best: list[CandidateFit]
    too_large: list[CandidateFit]
    considered: int
    closest: CandidateFit | None = None
    rejections: Rejections = field(default_factory=Rejections)
    max_positions: int = 1 << 62


class Planner:
    """Planner of layouts for one model, optionally with LoRA, on one kind of hardware."""

    def __init__(
        self,
        spec: ModelSpec,
        args: BaseModelArgs,
        hardware: Hardware,
        lora: Mapping[str, LoRASize] | None = None,
        saved_modules: Collection[str] = (),
        quantize_base: BaseFormat | Literal["none"] = "none",
    ) -> None:
        self.args, self.hardware = args, hardware
        self.weights = ModelWeights.from_spec(spec, args, lora, saved_modules, quantize_base)
        # Only a CPU's hardware file sets `processors`.
        self.memory_model = MemoryModel(args, self.weights, None if hardware.processors else hardware.memory_bytes)
        self._configs: dict[str, EngineConfig] = {}

    def plan(self, request: PlanRequest, best: int = 10, near: int = 5) -> Plan:
        """Return the `best` layouts for the request, and up to `near` faster ones that do not fit.

        Raises:
            UserError: a step has fewer tokens than a document.
            ConfigError: FP8 is requested, but the hardware has no FP8 matmuls or no block would use them.
        """
        if request.tokens < request.seq:
            raise UserError(
                f"tokens is {request.tokens}; expected at least seq, the {request.seq} tokens of a document; raise it"
            )
        times = TimeModel(self.args, self.hardware, request.seq, self.weights.lora_layers)
        rejections = Rejections()
        candidates = sorted(self.candidates(request, times, rejections), key=lambda c: c.seconds.total)
        fitting: dict[object, CandidateFit] = {}
        not_fitting: dict[object, CandidateFit] = {}
        closest: CandidateFit | None = None
        for candidate in candidates:
            if len(fitting) == best:
                break
            if candidate.key in fitting:
                continue
            fit = self.predict_memory(request, candidate)
            if fit.headroom < 0:
                not_fitting.setdefault(candidate.key, fit)
                if closest is None or fit.headroom > closest.headroom:
                    closest = fit
            elif error := self._engine_error(request, candidate):
                rejections.refused[error] += 1
            else:
                fitting[candidate.key] = self._with_fewer_recomputed(request, times, fit)
        fitting = dict(sorted(fitting.items(), key=lambda item: item[1].candidate.seconds.total))
        too_large = [fit for key, fit in not_fitting.items() if key not in fitting][:near]
        chosen, considered, longest = list(fitting.values()), len(candidates), self.args.max_seq_len
        return Plan(request, self.hardware, times.flops, chosen, too_large, considered, closest, rejections, longest)

    def config(self, request: PlanRequest, candidate: Candidate) -> EngineConfig:
        """Return the engine's configuration of a candidate."""
        return self._config(request, str(candidate.layout), candidate.options, candidate.tokens)

    def predict_memory(self, request: PlanRequest, candidate: Candidate) -> CandidateFit:
        """Return a candidate with the memory of its largest rank and the remaining GPU memory."""
        config = self._config(request, "d1", candidate.options, candidate.tokens)
        memory = self.memory_model.estimate_largest_rank(
            config, candidate.layout, candidate.tokens, candidate.micro_batches
        )
        hw = self.hardware
        used = memory.total + hw.reserve_bytes + hw.fragmentation * memory.step
        return CandidateFit(candidate, memory, int(hw.memory_bytes - used))

    def seconds(self, config: EngineConfig, seq: int, documents: int) -> StepTime:
        """Return the time of a step of `config` on `documents` documents of `seq` tokens over all ranks."""
        layout = parse_layout(config.layout)
        plan = self.memory_model.plan(config, layout)
        documents_per_rank = -(-documents // layout.dp)
        packed = min(documents_per_rank, max(1, config.max_tokens_per_mb // seq))
        counts = self._largest_counts(layout, plan)
        return TimeModel(self.args, self.hardware, seq, self.weights.lora_layers).step(
            config, layout, plan, counts, packed * seq, -(-documents_per_rank // packed)
        )

    def candidates(self, request: PlanRequest, times: TimeModel, rejections: Rejections) -> Iterator[Candidate]:
        """Yield the candidates with masters, gradients and moments that fit; count the others in `rejections`."""
        hw = self.hardware
        unknown = {name for layer in self.args.layer_specs for name in kinds_without_formula(layer)}
        for layout in layouts(self.args, request.gpus, hw.gpus_per_node):
            if unknown and is_shared(layout):
                rejections.unknown += 1
                continue
            for pipeline in self._pipelines(layout):
                options: dict[str, Any] = {"pipeline": pipeline} if pipeline else {}
                base = self._config(request, "d1", options, request.seq)
                plan = self.memory_model.plan(base, layout)
                counts = self._largest_counts(layout, plan)
                if counts.state_bytes(request.dtype) + hw.reserve_bytes > hw.memory_bytes:
                    rejections.exceeds_memory += 1
                    continue
                sizes = list(micro_batches(request, layout))
                rejections.idle += not sizes
                for (tokens, n), policy in product(sizes, POLICIES):
                    for reduction in ("per_step", "per_microbatch") if n > 1 and plan is None else ("per_step",):
                        choices = options | {"activation_checkpoint": policy, "gradient_reduction": reduction}
                        config = self._config(request, "d1", choices, tokens)
                        seconds = times.step(config, layout, plan, counts, tokens, n)
                        yield Candidate(layout, choices, tokens, n, seconds)

    def _with_fewer_recomputed(self, request: PlanRequest, times: TimeModel, fit: CandidateFit) -> CandidateFit:
        """Return a candidate that recomputes as few of the first blocks as fit; unchanged unless it recomputes all."""
        candidate, hw = fit.candidate, self.hardware
        if candidate.options["activation_checkpoint"] != {"mode": "full"}:
            return fit
        config, layout = self._config(request, "d1", candidate.options, candidate.tokens), candidate.layout
        budget = hw.memory_bytes - hw.reserve_bytes
        policy = choose_recompute(self.memory_model, config, budget, layout, candidate.micro_batches).policy
        options = candidate.options | {"activation_checkpoint": policy.model_dump(include={"mode", "selective"})}
        config = self._config(request, "d1", options, candidate.tokens)
        plan = self.memory_model.plan(config, layout)
        counts = self._largest_counts(layout, plan)
        seconds = times.step(config, layout, plan, counts, candidate.tokens, candidate.micro_batches)
        fewer = self.predict_memory(request, replace(candidate, options=options, seconds=seconds))
        return fewer if fewer.headroom >= 0 else fit

    def _pipelines(self, layout: ParallelLayout) -> list[dict[str, Any]]:
        if layout.pp == 1:
            return [{}]
        schedules: list[dict[str, Any]] = [{"schedule": "1f1b"}]
        if self.args.n_layers >= 2 * layout.pp:
            schedules.append({"schedule": "interleaved_1f1b", "stages_per_rank": 2})
        return schedules

    def _largest_counts(self, layout: ParallelLayout, plan: StagePlan | None) -> RankParameters:
        """Return the parameter counts of the rank with the most parameters."""
        counts = (rank_parameters(self.weights, layout, plan, rank) for rank in candidate_ranks(layout, plan))
        return max(counts, key=lambda count: count.local)

    def _config(self, request: PlanRequest, layout: str, options: dict[str, Any], tokens: int) -> EngineConfig:
        key = repr((request, layout, options, tokens))
        if key not in self._configs:
            fields = {"path": request.path, "dtype": request.dtype, "layout": layout, "max_tokens_per_mb": tokens}
            fields |= {"lora": request.lora, "fp8": request.fp8}
            self._configs[key] = EngineConfig.model_validate(fields | options)
        return self._configs[key]

    def _engine_error(self, request: PlanRequest, candidate: Candidate) -> str:
        """Return the engine's error for a candidate, or an empty string."""
        config = self.config(request, candidate)
        try:
            resolve_layout(config, self.args.sizes, "cuda", supports_gathered=supports_gathered(config.attn_type))
        except UserError as error:
            return str(error)
        return ""


def micro_batches(request: PlanRequest, layout: ParallelLayout) -> Iterator[tuple[int, int]]:
    """Yield (tokens of a micro-batch, micro-batches of a step) that keep every rank and pipeline stage busy."""
    total = request.tokens // request.seq
    if total < layout.dp:
        return
    documents = -(-total // layout.dp)  # of the rank with the most documents; the others wait for it
    packed = 1
    while packed <= documents and packed * request.seq <= max(MAX_PACK, request.seq):
        n = -(-documents // packed)
        if layout.pp == 1 or n >= layout.pp:
            yield packed * request.seq, n
        packed *= 2


def layouts(args: BaseModelArgs, gpus: int, gpus_per_node: int) -> Iterator[ParallelLayout]:
    """Yield the legal layouts of `gpus` ranks that are tried.

    Tensor parallelism stays within a node, and a replica of a sharded model has at least the GPUs of a node.
    """
    node = min(gpus, gpus_per_node)
    sizes = args.sizes
    expert_degrees = _divisors(sizes.experts) if sizes.experts else [1]
    for tp, pp in product(_divisors(gpus), repeat=2):
        if tp > node or pp > args.n_layers or gpus % (tp * pp):
            continue
        for cp, replicas in product(_divisors(gpus // (tp * pp)), repeat=2):
            shard, remainder = divmod(gpus // (tp * pp) // cp, replicas)
            if cp > MAX_CONTEXT or remainder or (replicas > 1 and shard * cp * tp < node):
                continue
            for etp in sorted({1, tp}):
                expert_ranks = shard * cp * (tp if etp == 1 else 1)
                for ep in expert_degrees:
                    if expert_ranks % ep or (etp > 1 and not sizes.experts):
                        continue
                    layout = ParallelLayout(shard, replicas, pp, tp, cp, ep, etp)
                    if find_violation(layout, sizes) is None:
                        yield layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
