"""Record of a sweep: a JSON file with one row per point, measured or failed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from archon.schema.config import StrictModel
from archon.schema.errors import ConfigError
from archon.schema.files import JSON_BYTES, read_limited
from archon.tools.bench.config import Point, SweepConfig
from archon.tools.bench.origin import Machine, NumericCheck, Spread, max_by_name

Status = Literal["ok", "refused", "out of memory", "hung", "deviates", "failed"]
Segment = tuple[str, float, float]
"""(phase or kind of collective, start, duration), in microseconds."""

# Collectives that send hidden states between pipeline stages; waiting for them counts as bubble.
BETWEEN_STAGES = frozenset({"send", "recv", "send_recv"})
COMPUTE = ("forward", "backward", "head", "optimizer")


class Losses(StrictModel):
    """Losses of two steps on a batch."""

    loss: float = Field(description="of the first step, nats a token")
    grad_norm: float = Field(description="of the first step")
    loss_after_one_step: float


class CollectiveTraffic(StrictModel):
    """Collectives of one kind over one group in a step; `bytes` counts the larger of input and output."""

    kind: str
    group: str = Field(description="mesh dimension")
    size: int = Field(description="ranks of the group")
    count: int
    bytes: int


class RankResult(StrictModel):
    """Measurements of one rank."""

    step_s: list[float] = Field(description="seconds of each timed step, without the profiler")
    memory_bytes: dict[str, Annotated[int, Field(lt=2**63)]] = Field(description="allocated, reserved, rss_growth")
    profiled_s: float = Field(description="wall-clock seconds of the profiled step")
    start_us: float = Field(description="start of the profiled step, on a clock shared by all ranks")
    phases_s: dict[str, float] = Field(description="by phase and kind of collective; their sum is the profiled step")
    schedule_us: tuple[float, float, float] | None = Field(description="see `schedule_span`, of the profiled step")
    segments: list[Segment] = Field(description="partition of the profiled step, relative to its start")
    collective_busy_s: dict[str, float] = Field(
        default_factory=dict, description="on a GPU, by kind: total time of collectives, overlapped or not"
    )
    gemm_flops: float = Field(0.0, description="on a CPU: FLOP/s of a matmul while all ranks run one")


class Measurement(StrictModel):
    """Measurements of a point over all ranks."""

    ranks: int = Field(ge=1, lt=2**31)
    threads: int
    losses: Losses
    routing: Literal["natural", "forced"] | None = Field(
        None, description="expert choice: by the router, or forced to be even; null for a dense model"
    )
    traffic: list[CollectiveTraffic] = Field(description="collectives of rank 0")
    by_rank: list[RankResult] = Field(min_length=1)
    peak_flops: float | None = Field(gt=0, description="peak FLOP/s of all ranks together, the denominator of MFU")
    peak_source: str
    flops_full: float = Field(description="FLOPs of a step, all ranks; attention counted in full")
    flops_causal: float
    step_s: Spread = Field(description="seconds of a step on the slowest rank")
    tokens_per_s: Spread

    @model_validator(mode="after")
    def _check_durations(self) -> Measurement:
        schedules = [rank.schedule_us for rank in self.by_rank if rank.schedule_us is not None]
        phases = [sum(rank.phases_s.values()) for rank in self.by_rank if rank.phases_s]
        spans = [self.step_s.median, self.tokens_per_s.median, *phases, *(last - first for first, last, _ in schedules)]
        if min(spans) <= 0:
            raise ValueError("a step has a duration or token rate of 0; expected a positive number")
        return self


class PointRequest(StrictModel):
    """Input of a point's ranks; `reference` is a layout and its losses, for comparison."""

    config: SweepConfig
    point: Point
    reference: tuple[str, Losses] | None


class PointResult(StrictModel):
    """Output of a point's ranks."""

    measurement: Measurement
    checks: list[NumericCheck]


class BenchRow(StrictModel):
    """One point of a sweep with its status and measurement."""

    point: Point
    status: Status
    reason: str = Field("", description="the failure in one line")
    checks: list[NumericCheck] = Field(default_factory=list)
    measured: Measurement | None = None
    notes: list[str] = Field(default_factory=list)

    @property
    def mfu(self) -> tuple[float, float] | None:
        """MFU of the median step, with attention counted in full and causally."""
        m = self.measured
        if m is None or m.peak_flops is None:
            return None
        return tuple(flops / m.step_s.median / m.peak_flops for flops in (m.flops_full, m.flops_causal))  # type: ignore

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds by phase, mean over the ranks, longest first, `other` last."""
        ranks = [] if self.measured is None else self.measured.by_rank
        means = sum_by_name((name, s / len(ranks)) for rank in ranks for name, s in rank.phases_s.items())
        return dict(sorted(means.items(), key=lambda item: (item[0] == "other", -item[1])))

    @property
    def peak_memory(self) -> dict[str, int]:
        """Maximum bytes over the ranks, by kind."""
        return max_by_name([rank.memory_bytes for rank in self.measured.by_rank] if self.measured else [])

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of the largest rank: allocated on a GPU, growth of resident memory on a CPU."""
        return self.peak_memory.get("allocated", self.peak_memory.get("rss_growth"))

    @property
    def bubble(self) -> list[float] | None:
        """Idle fraction of the schedule on each pipeline rank; None without a pipeline.

        A rank is idle if it neither computes nor runs a collective within its stage. The schedule spans from the first
        forward to the last backward of any stage.
        """
        m = self.measured
        if m is None or not any(traffic.kind in BETWEEN_STAGES for traffic in m.traffic):
            return None
        schedules = [(rank.start_us, *rank.schedule_us) for rank in m.by_rank if rank.schedule_us is not None]
        spans = [(begin + first, begin + last, busy) for begin, first, last, busy in schedules]
        window = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
        return [1 - busy / window for _, _, busy in spans]


def sum_by_name(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the values of each name."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in values:
        sums[name] += value
    return dict(sums)


def schedule_span(segments: Sequence[Segment]) -> tuple[float, float, float] | None:
    """Return (first forward's start, last backward's end, busy time between) in µs; None without passes."""
    passes = [(start, start + length) for name, start, length in segments if name in ("forward", "backward")]
    if not passes:
        return None
    first, last = passes[0][0], passes[-1][1]
    idle = BETWEEN_STAGES | {"other"}
    return first, last, sum(n for name, start, n in segments if first <= start < last and name not in idle)


class BenchRecord(StrictModel):
    """Record of one sweep."""

    benchmark: Literal["layouts"] = "layouts"
    command: str
    commit: str = Field(description="commit; ends with `+` if tracked files differed")
    date: str
    versions: dict[str, str]
    machine: Machine
    setup: dict[str, Any] = Field(description="the sweep's configuration, and the model's sizes")
    rows: list[BenchRow] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_setup(self) -> BenchRecord:
        sweep = self.setup.get("sweep", {})
        for part in (sweep, self.setup.get("model", {}), sweep.get("engine", {}) if isinstance(sweep, dict) else None):
            if not isinstance(part, dict):
                raise ValueError("setup: expected mappings sweep, sweep.engine and model")
        return self

    def write(self, path: str | Path) -> None:
        """Write the record as JSON with one row per line, atomically."""
        data = self.model_dump()
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in data.pop("rows"))
        head = json.dumps(data, indent=1, ensure_ascii=False).removesuffix("\n}")
        partial = Path(path).with_name(f".{Path(path).name}.new")
        # A folder name may contain bytes that are not valid text.
        partial.write_text(f'{head},\n "rows": [\n{rows}\n]}}\n', encoding="utf-8", errors="replace")
        partial.replace(path)


def read_record(path: str | Path) -> BenchRecord:
    """Return the record in a file, or raise ConfigError if the file is no sweep record."""
    content = read_limited(path, JSON_BYTES)
    try:
        data = json.loads(content.decode())
        json.dumps(data, ensure_ascii=False).encode()  # fails on a lone surrogate, which no page can show
        return BenchRecord.model_validate(data)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, wrong fields, a huge number
        raise ConfigError(f"{path} is not a record of archon bench; expected a JSON file written by --record") from None
