"""Partition of a profiled step into segments without gaps or overlaps: phases, collectives, and the rest.

On a CPU, it partitions the time of the training thread; a collective has the time of its start and of the wait for it.
On a GPU, it partitions the time of the device: a phase while computation runs, a kind of collective while only
collectives run, else `other`, the wait for the host. The segments add up to the step, so a collective that overlaps
with computation counts nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from archon.parallel.collectives import collective_kind
from archon.tools.bench.bench_record import COMPUTE, Segment, sum_by_name

LABEL = "archon:"
STEP = "step"
OTHER = "other"
# Autograd's names of the head's backward pass.
HEAD_NODES = ("_WeightedLossBackward", "_TokenScoresBackward")
# Maximum number of segments in a record; the shortest are merged with their neighbors.
MAX_SEGMENTS = 2000

_KIND_OF_NCCL_KERNEL = {
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
    "SendRecv": "send_recv",
    "Broadcast": "broadcast",
}


@dataclass(frozen=True)
class Span:
    """Named interval from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """Profiled step of one rank: `start` in microseconds on a shared clock, and segments relative to it."""

    start: float
    segments: list[Segment]
    collective_busy_s: dict[str, float]


def read_profile(trace: dict[str, Any], on_gpu: bool) -> Profile:
    """Return the profile in a `torch.profiler` trace that has one `archon:step`."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    step = next(event for event in events if event["name"] == LABEL + STEP and event.get("cat") == "user_annotation")
    outer = Span(STEP, step["ts"], step["ts"] + step["dur"])
    spans = [_span(event) for event in events if on_gpu or event["tid"] == step["tid"]]
    host = partition_nested(
        outer, [span for span in spans if span and span.start >= outer.start and span.end <= outer.end]
    )
    kernels = list(_kernels(events, host)) if on_gpu else []
    collectives = [span for span in kernels if span.name not in (*COMPUTE, OTHER)]
    busy = sum_by_name((span.name, (span.end - span.start) / 1e6) for span in collectives)
    parts = partition_overlapping(outer, kernels) if on_gpu else host
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    return Profile(base + outer.start, _segments(parts, outer.start), busy)


def _span(event: dict[str, Any]) -> Span | None:
    """Return the span of a phase or collective on the host; None for other events."""
    name, category = event["name"], event.get("cat")
    label: str | None = None
    if category == "user_annotation" and name.startswith(LABEL) and name != LABEL + STEP:
        label = name.removeprefix(LABEL)
    elif category == "cpu_op" and name.startswith("autograd::engine::evaluate_function: "):
        label = "head" if name.endswith(HEAD_NODES) else None
    elif category == "cpu_op":
        space, _, operator = name.partition("::")
        label = "wait" if name == "_c10d_functional::wait_tensor" else collective_kind(space, operator)
    return None if label is None else Span(label, event["ts"], event["ts"] + event["dur"])


def partition_nested(outer: Span, spans: Iterable[Span]) -> list[Span]:
    """Partition `outer` by its innermost spans; time without a span is `other`.

    A `wait` has the name of the last started collective.
    """
    result: list[Span] = []
    open_spans: list[Span] = [Span(OTHER, outer.start, outer.end)]
    at, last = outer.start, OTHER

    def advance(to: float) -> None:
        nonlocal at
        if to > at:
            result.append(Span(open_spans[-1].name, at, to))
            at = to

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while len(open_spans) > 1 and open_spans[-1].end <= span.start:
            advance(open_spans[-1].end)
            open_spans.pop()
        advance(span.start)
        if span.name == "wait":
            span = Span(last, span.start, span.end)
        elif span.name not in COMPUTE:
            last = span.name
        open_spans.append(span)
    while open_spans:
        advance(open_spans[-1].end)
        open_spans.pop()
    return result


def _kernels(events: Sequence[dict[str, Any]], host: Sequence[Span]) -> Iterable[Span]:
    """Yield the spans of the device: collectives by kind, other kernels by the host phase of their launch."""
    starts = [span.start for span in host]
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name, end = event["name"], event["ts"] + event["dur"]
        if "nccl" in name.lower():
            kind = next((kind for part, kind in _KIND_OF_NCCL_KERNEL.items() if part in name), "collective")
            # NCCL implements all-to-all with its send-receive kernel; torch records the called collective.
            called = str(event.get("args", {}).get("Collective name", "")).replace("_", "")
            kind = "all_to_all" if kind == "send_recv" and called.startswith("alltoall") else kind
            yield Span(kind, event["ts"], end)
            continue
        launched = launches.get(event.get("args", {}).get("correlation"), event["ts"])
        index = bisect.bisect_right(starts, launched) - 1
        phase = host[index].name if 0 <= index < len(host) else OTHER
        # A collective's copies outside its kernel count as `other`.
        yield Span(phase if phase in COMPUTE else OTHER, event["ts"], end)


def partition_overlapping(outer: Span, spans: Iterable[Span]) -> list[Span]:
    """Partition `outer` by overlapping spans; time without a span is `other`.

    Precedence: computation, then `other`, then collectives; among equals, the latest start.
    """
    edges: list[tuple[float, int, int, Span]] = []
    for number, span in enumerate(spans):
        if span.end > outer.start and span.start < outer.end:
            edges += [(max(span.start, outer.start), 1, number, span), (min(span.end, outer.end), 0, number, span)]

    def precedence(span: Span) -> tuple[int, float]:
        return (2 if span.name in COMPUTE else span.name == OTHER), span.start

    result: list[Span] = []
    running: dict[int, Span] = {}
    at, none = outer.start, Span(OTHER, 0, 0)
    for time, begins, number, span in [*sorted(edges, key=lambda edge: edge[:3]), (outer.end, 0, -1, outer)]:
        if time > at:
            result.append(Span(max(running.values(), key=precedence, default=none).name, at, time))
            at = time
        if begins:
            running[number] = span
        else:
            running.pop(number, None)
    return result


def _segments(parts: Iterable[Span], start: float) -> list[Segment]:
    """Return segments (name, start, duration) of the spans; neighbors with equal names are merged."""
    result: list[Segment] = []
    for part in parts:
        if result and result[-1][0] == part.name:
            name, since, length = result.pop()
            result.append((name, since, length + part.end - part.start))
        else:
            result.append((part.name, part.start - start, part.end - part.start))
    return result


def merge_short_segments(segments: list[Segment], most: int = MAX_SEGMENTS) -> list[Segment]:
    """Return about the `most` longest segments; shorter segments are merged into their predecessor."""
    if len(segments) <= most:
        return segments
    least = sorted(length for _, _, length in segments)[-most]
    spans: list[Span] = []
    for name, start, length in segments:
        kept = name if not spans or length >= least else spans[-1].name
        spans.append(Span(kept, start, start + length))
    return _segments(spans, 0.0)
