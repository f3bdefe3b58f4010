"""Compares two records of sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from archon.bench.bench_record import BenchRecord, BenchRow
from archon.bench.origin import Spread
from archon.bench.table import aligned


def compare_records(a: BenchRecord, b: BenchRecord) -> list[str]:
    """Returns a line for each point of both records: throughput, memory, the ratios B / A, and a mark for a difference.

    A difference is marked where the two ranges of throughput, minimum to maximum, do not overlap.
    """
    theirs: dict[str, list[BenchRow]] = {}
    for row in b.rows:
        theirs.setdefault(row.point.model_dump_json(), []).append(row)
    lines = [f"{name}: {r.command} at {r.commit}, {r.date}, {r.machine.cpu}" for name, r in (("A", a), ("B", b))]
    if a.machine != b.machine:
        lines.append("the two are from different machines, so their times are not comparable")
    lines += [f"the two differ in {what}" for what in _differences(a.setup, b.setup)]
    rows = [("point", "A tok/s", "B tok/s", "B / A", "", "A MiB", "B MiB", "B / A")]
    unmatched = []
    for ours in a.rows:
        same = theirs.get(ours.point.model_dump_json())
        if not same:
            unmatched.append(f"{ours.point.name}: only in A")
            continue
        other = same.pop(0)
        if ours.measured is None or other.measured is None:
            unmatched.append(f"{ours.point.name}: A {_outcome(ours)}; B {_outcome(other)}")
        else:
            x, y = ours.measured.tokens_per_s, other.measured.tokens_per_s
            first, second = (_memory(row) for row in (ours, other))
            rows.append(
                (
                    ours.point.name,
                    f"{x.median:,.0f}",
                    f"{y.median:,.0f}",
                    f"{y.median / x.median:.3f}",
                    verdict(x, y),
                    "-" if first is None else f"{first / 2**20:,.0f}",
                    "-" if second is None else f"{second / 2**20:,.0f}",
                    "-" if not first or second is None else f"{second / first:.3f}",
                )
            )
    unmatched += [f"{row.point.name}: only in B" for rest in theirs.values() for row in rest]
    return [*lines, *(aligned(rows) if len(rows) > 1 else []), *unmatched]


def verdict(a: Spread, b: Spread) -> str:
    """Returns `faster` or `slower` for B, where the two ranges do not overlap, else an empty string."""
    if b.min > a.max:
        return "faster"
    return "slower" if b.max < a.min else ""


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of two set-ups besides their points: model, engine, threads and device."""
    for part, read in (("the model's", _part("model")), ("the engine's", _part("sweep", "engine"))):
        ours, theirs = read(a), read(b)
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                yield f"{part} {name}: {ours.get(name)} and {theirs.get(name)}"
    for name in ("threads", "device"):
        first, second = (_part("sweep")(setup).get(name) for setup in (a, b))
        if first != second:
            yield f"{name}: {first} and {second}"


def _part(*path: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns a function that returns the part of a set-up at `path`, empty where there is none."""

    def read(setup: Mapping[str, Any]) -> dict[str, Any]:
        part = dict(setup)
        for name in path:
            part = dict(part.get(name, {}))
        return part

    return read


def _outcome(row: BenchRow) -> str:
    return "measured" if row.measured is not None else f"{row.status} ({row.reason})"


def _memory(row: BenchRow) -> int | None:
    """Returns the peak in bytes: allocated memory on a GPU, growth of resident memory on a CPU."""
    sizes = row.peak_memory
    return sizes.get("allocated", sizes.get("rss_growth"))
