"""Two records side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from archon.bench.origin import Spread
from archon.bench.record import BenchRecord, Row
from archon.bench.table import aligned


def compare_records(a: BenchRecord, b: BenchRecord) -> list[str]:
    """A line for each point of both: throughput and memory, the ratio B / A, and whether it is more than the spread.

    A difference is marked where the two ranges, smallest to largest step, do not overlap.
    """
    theirs: dict[str, list[Row]] = {}
    for row in b.rows:
        theirs.setdefault(row.point.model_dump_json(), []).append(row)
    lines = [f"{name}: {of.command} at {of.commit}, {of.date}, {of.machine.cpu}" for name, of in (("A", a), ("B", b))]
    if a.machine != b.machine:
        lines.append("the two are from different machines, and their times say little of each other")
    lines += [f"the two differ in {what}" for what in _differences(a.setup, b.setup)]
    rows = [("point", "A tok/s", "B tok/s", "B / A", "", "A MiB", "B MiB", "B / A")]
    apart = []
    for ours in a.rows:
        same = theirs.get(ours.point.model_dump_json())
        if not same:
            apart.append(f"{ours.point.name}: in A alone")
            continue
        other = same.pop(0)
        if ours.measured is None or other.measured is None:
            apart.append(f"{ours.point.name}: A {_outcome(ours)}; B {_outcome(other)}")
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
    apart += [f"{row.point.name}: in B alone" for rest in theirs.values() for row in rest]
    return [*lines, *(aligned(rows) if len(rows) > 1 else []), *apart]


def verdict(a: Spread, b: Spread) -> str:
    """Of B: `faster` or `slower` beyond the spread of both, else nothing."""
    if b.min > a.max:
        return "faster"
    return "slower" if b.max < a.min else ""


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """What else than the points tells two sweeps apart: the model's fields, the engine's, threads and device."""
    for part, of in (("the model's", _part("model")), ("the engine's", _part("sweep", "engine"))):
        ours, theirs = of(a), of(b)
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                yield f"{part} {name}: {ours.get(name)} and {theirs.get(name)}"
    for name in ("threads", "device"):
        first, second = (_part("sweep")(setup).get(name) for setup in (a, b))
        if first != second:
            yield f"{name}: {first} and {second}"


def _part(*path: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A reader of a part of a set-up; empty where there is none."""

    def read(setup: Mapping[str, Any]) -> dict[str, Any]:
        part = dict(setup)
        for name in path:
            part = dict(part.get(name, {}))
        return part

    return read


def _outcome(row: Row) -> str:
    return "measured" if row.measured is not None else f"{row.status} ({row.reason})"


def _memory(row: Row) -> int | None:
    """The peak that counts: allocated on a GPU, resident on a CPU."""
    sizes = row.peak_memory
    return sizes.get("allocated", sizes.get("rss_growth"))
