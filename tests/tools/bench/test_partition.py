"""A profiled step is cut without gap or overlap, whatever ran at the same time."""

from __future__ import annotations

import pytest

from archon.tools.bench.partition import (
    Span,
    merge_short_segments,
    partition_nested,
    partition_overlapping,
    read_profile,
)


def event(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: object) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "tid": tid, "args": args}


def label(name: str, start: float, end: float) -> dict[str, object]:
    return event(f"archon:{name}", start, end, "user_annotation")


STEP = [
    label("step", 100, 200),
    label("forward", 105, 145),
    event("_c10d_functional::all_gather_into_tensor", 110, 112),
    event("_c10d_functional::wait_tensor", 112, 120),
    label("head", 130, 140),
    event("aten::mm", 131, 139),
    label("backward", 150, 190),
    event("autograd::engine::evaluate_function: _WeightedLossBackward", 151, 155),
    label("reduce_scatter", 160, 170),
    event("c10d::_reduce_scatter_base_", 158, 159),
    event("c10d::allreduce_", 10, 20),
    label("forward", 110, 190) | {"tid": 2},
]


def test_a_step_on_a_cpu_is_cut_by_the_thread_that_trains() -> None:
    profile = read_profile({"traceEvents": STEP, "baseTimeNanoseconds": 7000}, on_gpu=False)
    sums: dict[str, float] = {}
    for name, _, length in profile.segments:
        sums[name] = sums.get(name, 0) + length
    assert sums == {
        "other": 5 + 5 + 10,
        "forward": 40 - 10 - 10,
        "all_gather": 10,
        "head": 10 + 4,
        "backward": 40 - 4 - 10 - 1,
        "reduce_scatter": 11,
    }
    assert sum(sums.values()) == 100
    assert profile.start == 107
    assert [start for _, start, _ in profile.segments] == sorted(start for _, start, _ in profile.segments)


def test_a_step_on_a_gpu_is_cut_by_what_the_device_did() -> None:
    launches = [event("cudaLaunchKernel", at, at + 1, "cuda_runtime", correlation=at) for at in (106, 132, 152, 161)]
    kernels = [
        event("gemm", 110, 130, "kernel", 7, correlation=106),
        event("ncclDevKernel_AllGather_RING", 120, 140, "kernel", 8),
        event("softmax", 150, 160, "kernel", 7, correlation=132),
        event("gemm", 165, 195, "kernel", 7, correlation=161),
    ]
    trace = {"traceEvents": [*STEP, *launches, *kernels]}
    profile = read_profile(trace, on_gpu=True)
    names = [(name, start, start + length) for name, start, length in profile.segments]
    assert names[:5] == [
        ("other", 0, 10),
        ("forward", 10, 30),
        ("all_gather", 30, 40),
        ("other", 40, 50),
        ("head", 50, 60),
    ]
    assert profile.segments[-1][1] + profile.segments[-1][2] == 100
    assert profile.collective_busy_s == pytest.approx({"all_gather": 20e-6}), "hidden or not"


def test_an_exchange_among_all_is_not_one_between_stages() -> None:
    """NCCL runs both by one kernel."""
    kernels = [
        event("ncclDevKernel_SendRecv(args)", 110, 120, "kernel", 8, **{"Collective name": "all_to_allv"}),
        event("ncclDevKernel_SendRecv(args)", 120, 125, "kernel", 8, **{"Collective name": "send"}),
        event("ncclDevKernel_SendRecv(args)", 125, 128, "kernel", 8),
    ]
    profile = read_profile({"traceEvents": [label("step", 100, 200), *kernels]}, on_gpu=True)
    assert profile.collective_busy_s == pytest.approx({"all_to_all": 10e-6, "send_recv": 8e-6})


def test_what_overlaps_counts_once() -> None:
    parts = partition_overlapping(
        Span("step", 0, 10),
        [Span("all_reduce", 0, 8), Span("forward", 2, 4), Span("backward", 3, 5), Span("x", 12, 14)],
    )
    assert [(part.name, part.end - part.start) for part in parts] == [
        ("all_reduce", 2),
        ("forward", 1),
        ("backward", 1),
        ("backward", 1),
        ("all_reduce", 3),
        ("other", 2),
    ]


def test_what_follows_a_nested_span_is_its_parents() -> None:
    parts = partition_nested(Span("step", 0, 10), [Span("forward", 1, 9), Span("head", 2, 3), Span("head", 4, 5)])
    assert [(part.name, part.start, part.end) for part in parts if part.name == "head"] == [
        ("head", 2, 3),
        ("head", 4, 5),
    ]
    assert sum(part.end - part.start for part in parts if part.name == "forward") == 6


def test_a_long_list_is_shortened_to_the_same_sum() -> None:
    segments = [("forward" if i % 2 else "backward", float(i), 1.0 + (i % 7 == 0)) for i in range(1000)]
    kept = merge_short_segments(segments, most=50)
    assert len(kept) <= 300 < len(segments)
    assert sum(length for _, _, length in kept) == pytest.approx(sum(length for _, _, length in segments))
