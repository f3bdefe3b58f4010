"""A record as a sweep would leave it, without any process."""

from __future__ import annotations

from archon.tools.bench.bench_record import (
    BenchRecord,
    BenchRow,
    CollectiveTraffic,
    Losses,
    Measurement,
    RankResult,
    schedule_span,
    sum_by_name,
)
from archon.tools.bench.config import Point
from archon.tools.bench.origin import origin, spread
from archon.tools.bench.shapes import even_shape

SEGMENTS = [("other", 0.0, 10.0), ("forward", 10.0, 40.0), ("recv", 50.0, 20.0), ("backward", 70.0, 30.0)]


def row(layout: str, seconds: list[float], memory: int = 2**20) -> BenchRow:
    ranks = [
        RankResult(
            step_s=seconds,
            memory_bytes={"rss_growth": memory},
            profiled_s=1e-4,
            start_us=1000.0 + 10 * rank,
            phases_s=sum_by_name((name, length / 1e6) for name, _, length in SEGMENTS),
            schedule_us=schedule_span(SEGMENTS),
            segments=list(SEGMENTS),
        )
        for rank in range(2)
    ]
    measured = Measurement(
        ranks=2,
        threads=1,
        losses=Losses(loss=2.0, grad_norm=1.0, loss_after_one_step=1.9),
        traffic=[CollectiveTraffic(kind="send", group="pp", size=2, count=1, bytes=64)],
        by_rank=ranks,
        peak_flops=1e9,
        peak_source="given",
        flops_full=2e7,
        flops_causal=1e7,
        step_s=spread(seconds, "s"),
        tokens_per_s=spread([64 / s for s in seconds], "tok/s"),
    )
    return BenchRow(point=point(layout), status="ok", measured=measured)


def point(layout: str) -> Point:
    return Point(
        layout=layout, shape=even_shape(8, 64), micro_batch=64, recompute="none", compile=False, dtype="float32"
    )


def record(*rows: BenchRow) -> BenchRecord:
    return BenchRecord(setup={"sweep": {"model": "tiny"}}, rows=list(rows), **origin("archon bench tiny"))
