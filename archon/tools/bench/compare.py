"""Comparison of two records of sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.tools.bench.bench_record import BenchRecord, BenchRow
from archon.tools.bench.origin import Spread
from archon.tools.bench.table import align_columns


def compare_records(a: BenchRecord, b: BenchRecord) -> list[str]:
    """Return a line per point: throughput and memory of both records, the ratios B / A, and `faster` or `slower`.

    A point is faster or slower if the two throughput ranges (minimum to maximum) do not overlap.
    """
    rows_of_b: dict[str, list[BenchRow]] = {}
    for row in b.rows:
        rows_of_b.setdefault(row.point.model_dump_json(), []).append(row)
    lines = [f"{name}: {r.command} at {r.commit}, {r.date}, {r.machine.cpu}" for name, r in (("A", a), ("B", b))]
    if a.machine != b.machine:
        lines.append("the records come from different machines; their times are not comparable")
    first, second = _settings(a.setup), _settings(b.setup)
    for name in first | second:
        if first.get(name) != second.get(name):
            lines.append(f"the records differ in {name}: {first.get(name)} and {second.get(name)}")
    rows = [("point", "A tok/s", "B tok/s", "B / A", "", "A MiB", "B MiB", "B / A")]
    unmatched = []
    for row in a.rows:
        same = rows_of_b.get(row.point.model_dump_json())
        if not same:
            unmatched.append(f"{row.point.name}: only in A")
            continue
        other = same.pop(0)
        if row.measured is None or other.measured is None:
            unmatched.append(f"{row.point.name}: A {_outcome(row)}; B {_outcome(other)}")
        else:
            x, y = row.measured.tokens_per_s, other.measured.tokens_per_s
            size, other_size = row.peak_bytes, other.peak_bytes
            rows.append(
                (
                    row.point.name,
                    f"{x.median:,.0f}",
                    f"{y.median:,.0f}",
                    f"{y.median / x.median:.3f}",
                    _verdict(x, y),
                    "-" if size is None else f"{size / 2**20:,.0f}",
                    "-" if other_size is None else f"{other_size / 2**20:,.0f}",
                    "-" if not size or other_size is None else f"{other_size / size:.3f}",
                )
            )
    unmatched += [f"{row.point.name}: only in B" for rows_left in rows_of_b.values() for row in rows_left]
    return [*lines, *(align_columns(rows) if len(rows) > 1 else []), *unmatched]


def _verdict(a: Spread, b: Spread) -> str:
    """Return `faster` or `slower` for B, or an empty string if the ranges overlap."""
    if b.min > a.max:
        return "faster"
    return "slower" if b.max < a.min else ""


def _settings(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a sweep except its points: model, engine, threads and device."""
    sweep = setup.get("sweep", {})
    values = {f"the model's {name}": value for name, value in sorted(setup.get("model", {}).items())}
    values |= {f"the engine's {name}": value for name, value in sorted(sweep.get("engine", {}).items())}
    return values | {name: sweep.get(name) for name in ("threads", "device")}


def _outcome(row: BenchRow) -> str:
    return "measured" if row.measured is not None else f"{row.status} ({row.reason})"
