"""Data of a sweep's page: throughput and memory of each point, timelines of the profiled steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.tools.bench.bench_record import BETWEEN_STAGES, BenchRecord, BenchRow
from archon.tools.bench.table import describe
from archon.tools.report.curves import COLORS

# Colors of phases and of collectives between stages; other collectives have COLLECTIVE_COLOR.
PHASE_COLORS = {"forward": COLORS[0], "backward": COLORS[1], "head": COLORS[3], "optimizer": COLORS[2]}
PHASE_COLORS |= dict.fromkeys((*BETWEEN_STAGES, "broadcast"), COLORS[4])
COLLECTIVE_COLOR = COLORS[5]


def bench_data(record: BenchRecord, path: Path) -> dict[str, Any]:
    """Return the data for the page's script; times in milliseconds, memory in MiB."""
    rates = [(row, row.measured.tokens_per_s) for row in record.rows if row.measured]
    sizes = [(row, row.peak_bytes / 2**20) for row in record.rows if row.peak_bytes is not None]
    throughput = [_bar(row, rate.median, rate.min, rate.max) for row, rate in rates]
    memory = [_bar(row, size, size, size) for row, size in sizes]
    return {
        "name": f"{Path(str(record.setup.get('sweep', {}).get('model', ''))).name or 'model'}: layouts side by side",
        "path": str(path.resolve()),
        "written": record.date,
        "command": record.command,
        "where": f"{record.machine.cpu}, {record.machine.cores} cores at {record.commit}",
        "bars": [
            {"title": "Throughput", "unit": "tokens a second", "bars": throughput},
            {"title": "Memory", "unit": "MiB, the largest rank", "bars": memory},
        ],
        "points": [_point(row) for row in record.rows],
    }


def _bar(row: BenchRow, value: float, low: float, high: float) -> dict[str, Any]:
    return {"name": row.point.name, "value": value, "min": low, "max": high}


def _point(row: BenchRow) -> dict[str, Any]:
    m = row.measured
    ranks = [] if m is None else m.by_rank
    begin = min((rank.start_us for rank in ranks), default=0.0)
    lanes: list[list[Any]] = [[] for _ in ranks]
    for lane, rank in zip(lanes, ranks, strict=True):
        for name, start, length in rank.segments:
            if name != "other":
                start_ms = round((rank.start_us - begin + start) / 1e3, 4)
                lane.append([name, start_ms, round(length / 1e3, 4), PHASE_COLORS.get(name, COLLECTIVE_COLOR)])
    return {"name": row.point.name, "status": row.status, "text": "\n".join(describe(row)[1:]), "lanes": lanes}
