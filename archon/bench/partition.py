"""A profiled step cut into segments without gap or overlap: phases, what is waited for, and the rest.

On a CPU the thread that trains is cut: a collective is what that thread spends starting it and waiting for it. On a GPU
the device is: where any computation runs, its phase; where only collectives run, their kind; else `other`, in which the
device waits for the host. So the parts add up to the step, and a collective hidden behind computation counts nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from archon.bench.record import COMPUTE, Segment
from archon.parallel.collectives import kind_of

LABEL = "archon:"
STEP = "step"
OTHER = "other"
# Autograd's name for the backward pass of what the head computes.
HEAD_NODES = ("_WeightedLossBackward", "_TokenScoresBackward")
# Of a segment list that is kept: the shortest segments join their neighbours.
MAX_SEGMENTS = 2000

_NCCL = {
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
    "SendRecv": "send_recv",
    "Broadcast": "broadcast",
}


@dataclass(frozen=True)
class Span:
    """Something that took a while: microseconds, from `start` to `end`."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """One rank's profiled step: `start` in microseconds of the time that ranks share; all segments, from there."""

    start: float
    segments: list[Segment]
    collective_busy_s: dict[str, float]


def read_profile(trace: dict[str, Any], on_gpu: bool) -> Profile:
    """Of a trace as `torch.profiler` exports it, within whose one `archon:step` all is."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    step = next(event for event in events if event["name"] == LABEL + STEP and event.get("cat") == "user_annotation")
    whole = Span(STEP, step["ts"], step["ts"] + step["dur"])
    labels = [span for event in events if on_gpu or event["tid"] == step["tid"] for span in _span(event)]
    labels = [span for span in labels if span.start >= whole.start and span.end <= whole.end]
    host = nested(whole, labels)
    busy: dict[str, float] = {}
    parts = host
    if on_gpu:
        kernels = list(_kernels(events, host))
        for span in kernels:
            if span.name not in (*COMPUTE, OTHER):
                busy[span.name] = busy.get(span.name, 0.0) + (span.end - span.start) / 1e6
        parts = covered(whole, kernels)
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    return Profile(base + whole.start, _segments(parts, whole.start), busy)


def _span(event: dict[str, Any]) -> list[Span]:
    """The part of a step that a host event is, if it is one."""
    name, kind = event["name"], event.get("cat")
    start, end = event["ts"], event["ts"] + event["dur"]
    if kind == "user_annotation" and name.startswith(LABEL) and name != LABEL + STEP:
        return [Span(name.removeprefix(LABEL), start, end)]
    if kind != "cpu_op":
        return []
    if name.startswith("autograd::engine::evaluate_function: "):
        return [Span("head", start, end)] if name.endswith(HEAD_NODES) else []
    space, _, operator = name.partition("::")
    if space == "_c10d_functional" and operator == "wait_tensor":
        return [Span("wait", start, end)]
    collective = kind_of(space, operator)
    return [] if collective is None else [Span(collective, start, end)]


def nested(whole: Span, spans: Iterable[Span]) -> list[Span]:
    """`whole` cut by the spans within it, the innermost winning; what none covers is `other`. A `wait` is for the
    collective started last."""
    result: list[Span] = []
    open_spans: list[Span] = [Span(OTHER, whole.start, whole.end)]
    at, last = whole.start, OTHER

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
    """What ran on the device: collectives by kind, the rest by what the host was at when it started them."""
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
            kind = next((kind for part, kind in _NCCL.items() if part in name), "collective")
            # NCCL exchanges among all by the kernel that sends between two; torch says what it was asked for.
            asked = str(event.get("args", {}).get("Collective name", "")).replace("_", "")
            kind = "all_to_all" if kind == "send_recv" and asked.startswith("alltoall") else kind
            yield Span(kind, event["ts"], end)
            continue
        launched = launches.get(event.get("args", {}).get("correlation"), event["ts"])
        index = bisect.bisect_right(starts, launched) - 1
        phase = host[index].name if 0 <= index < len(host) else OTHER
        # Copies that a collective makes besides its kernel belong to whoever asked for it.
        yield Span(phase if phase in COMPUTE else OTHER, event["ts"], end)


def covered(whole: Span, spans: Iterable[Span]) -> list[Span]:
    """`whole` cut by spans that may overlap: computation before `other` before collectives, of equals the one that
    started last; nothing is `other`."""
    edges: list[tuple[float, int, int, Span]] = []
    for number, span in enumerate(spans):
        if span.end > whole.start and span.start < whole.end:
            edges += [(max(span.start, whole.start), 1, number, span), (min(span.end, whole.end), 0, number, span)]
    result: list[Span] = []
    running: dict[int, Span] = {}
    at = whole.start
    for time, begins, number, span in [*sorted(edges, key=lambda edge: edge[:3]), (whole.end, 0, -1, whole)]:
        if time > at:
            result.append(Span(_foremost(running.values()), at, time))
            at = time
        if begins:
            running[number] = span
        else:
            running.pop(number, None)
    return result


def _foremost(running: Iterable[Span]) -> str:
    def importance(span: Span) -> tuple[int, float]:
        return (2 if span.name in COMPUTE else span.name == OTHER), span.start

    return max(running, key=importance, default=Span(OTHER, 0, 0)).name


def _segments(parts: Iterable[Span], start: float) -> list[Segment]:
    """Neighbours of one name joined, as (name, start, duration)."""
    result: list[Segment] = []
    for part in parts:
        if result and result[-1][0] == part.name:
            name, since, length = result.pop()
            result.append((name, since, length + part.end - part.start))
        else:
            result.append((part.name, part.start - start, part.end - part.start))
    return result


def shortened(segments: list[Segment], most: int = MAX_SEGMENTS) -> list[Segment]:
    """About the `most` longest segments, for a drawing; the others are joined to the one before them."""
    if len(segments) <= most:
        return segments
    least = sorted(length for _, _, length in segments)[-most]
    spans: list[Span] = []
    for name, start, length in segments:
        kept = name if not spans or length >= least else spans[-1].name
        spans.append(Span(kept, start, start + length))
    return _segments(spans, 0.0)
