"""Records of sweeps as text: a table, the details of a point, and the comparison of two records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from archon.tools.bench.bench_record import BenchRecord, BenchRow, Measurement, sum_by_name

MEMORY = {"allocated": "allocated", "reserved": "reserved", "rss_growth": "RSS growth"}


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns: the first column to the left, all others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ([row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in rows)
    return ["  ".join(line).rstrip() for line in lines]


def table(record: BenchRecord) -> list[str]:
    """Return one line per point; a failed point shows its reason."""
    kinds = next((row.peak_memory for row in record.rows if row.measured is not None), {})
    memory = f"{' / '.join(MEMORY.get(kind, kind) for kind in kinds) or 'memory'}, MiB"
    rows: list[tuple[str, ...]] = [
        ("point", "tok/s", "a rank", "step, ms", "min to max", "MFU full", "causal", memory, "bubble")
    ]
    failed = []
    for row in record.rows:
        m = row.measured
        if m is None:
            failed.append(f"{row.point.name}: {row.status}: {row.reason}")
            continue
        mfu = ["-", "-"] if row.mfu is None else [f"{100 * share:.1f} %" for share in row.mfu]
        bubble = "-" if row.bubble is None else f"{100 * max(row.bubble):.0f} %"
        rows.append(
            (
                row.point.name,
                f"{m.tokens_per_s.median:,.0f}",
                f"{m.tokens_per_s.median / m.ranks:,.0f}",
                f"{1e3 * m.step_s.median:.1f}",
                f"{1e3 * m.step_s.min:.1f} to {1e3 * m.step_s.max:.1f}",
                *mfu,
                " / ".join(f"{size / 2**20:,.0f}" for size in row.peak_memory.values()) or "-",
                bubble,
            )
        )
    return [*(align_columns(rows) if len(rows) > 1 else []), *failed]


def describe(row: BenchRow) -> list[str]:
    """Return the details of a point: figures, phases, collectives."""
    m = row.measured
    if m is None:
        return [row.point.name, f"  {row.status}: {row.reason}"]
    return [row.point.name, *_figures(row, m), *_phases(row, m), *_traffic(m), *(f"  note: {n}" for n in row.notes)]


def _figures(row: BenchRow, m: Measurement) -> list[str]:
    rate = m.tokens_per_s
    checks = [f", {c.what.replace('_', ' ')} within {c.difference:.0e} of {c.peer}'s" for c in row.checks]
    lines = [
        f"  losses      {m.losses.loss:.6g}, then {m.losses.loss_after_one_step:.6g}{''.join(checks)}",
        f"  tokens      {rate.median:,.0f} a second ({rate.min:,.0f} to {rate.max:,.0f})",
        f"  a rank      {rate.median / m.ranks:,.0f} tokens a second, {m.ranks} ranks of {m.threads} threads",
        f"  step        {1e3 * m.step_s.median:.2f} ms ({1e3 * m.step_s.min:.2f} to {1e3 * m.step_s.max:.2f})",
    ]
    if m.routing is not None:
        lines.append(f"  routing     {m.routing}")
    if row.mfu is None:
        lines.append(f"  MFU         {m.peak_source}")
    else:
        assert m.peak_flops is not None
        full, causal = (f"{100 * share:.2f} %" for share in row.mfu)
        lines.append(
            f"  MFU         {full} full, {causal} causal, of {m.peak_flops / 1e12:.4g} TFLOP/s ({m.peak_source})"
        )
    for kind, label in MEMORY.items():
        sizes = [rank.memory_bytes.get(kind) for rank in m.by_rank]
        if any(size is not None for size in sizes):
            each = " ".join("-" if size is None else f"{size / 2**20:,.0f}" for size in sizes)
            lines.append(f"  {label:<11} {each} MiB by rank")
    if row.bubble is not None:
        lines.append("  bubble      " + " ".join(f"{100 * share:.0f} %" for share in row.bubble) + " by rank")
    return lines


def _phases(row: BenchRow, m: Measurement) -> list[str]:
    total = sum(row.phases_s.values())
    parts = ", ".join(f"{name} {1e3 * s:.2f} ({100 * s / total:.0f} %)" for name, s in row.phases_s.items())
    lines = [f"  phases, ms  {parts}; {1e3 * total:.2f} in total, under the profiler"]
    busy = sum_by_name((kind, s / m.ranks) for rank in m.by_rank for kind, s in rank.collective_busy_s.items())
    if busy:
        lines.append("  collectives, ms, overlap included  " + ", ".join(f"{k} {1e3 * s:.2f}" for k, s in busy.items()))
    return lines


def _traffic(m: Measurement) -> list[str]:
    if not m.traffic:
        return []
    rows = [("  sends", "over", "ranks", "count", "bytes")]
    rows += [(f"  {t.kind}", t.group, str(t.size), str(t.count), f"{t.bytes:,}") for t in m.traffic]
    return align_columns(rows)


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
            verdict = "faster" if y.min > x.max else "slower" if y.max < x.min else ""
            rows.append(
                (
                    row.point.name,
                    f"{x.median:,.0f}",
                    f"{y.median:,.0f}",
                    f"{y.median / x.median:.3f}",
                    verdict,
                    "-" if size is None else f"{size / 2**20:,.0f}",
                    "-" if other_size is None else f"{other_size / 2**20:,.0f}",
                    "-" if not size or other_size is None else f"{other_size / size:.3f}",
                )
            )
    unmatched += [f"{row.point.name}: only in B" for rows_left in rows_of_b.values() for row in rows_left]
    return [*lines, *(align_columns(rows) if len(rows) > 1 else []), *unmatched]


def _settings(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a sweep except its points: model, engine, threads and device."""
    sweep = setup.get("sweep", {})
    values = {f"the model's {name}": value for name, value in sorted(setup.get("model", {}).items())}
    values |= {f"the engine's {name}": value for name, value in sorted(sweep.get("engine", {}).items())}
    return values | {name: sweep.get(name) for name in ("threads", "device")}


def _outcome(row: BenchRow) -> str:
    return "measured" if row.measured is not None else f"{row.status} ({row.reason})"
