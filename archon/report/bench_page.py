"""Data of a sweep's page: throughput and memory of each point, and a timeline of every rank's profiled step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.bench.bench_record import BenchRecord, BenchRow
from archon.bench.table import describe
from archon.report.curves import COLORS

# The page's colors by phase; collectives have one of the others.
PHASE_COLORS = {"forward": COLORS[0], "backward": COLORS[1], "head": COLORS[3], "optimizer": COLORS[2]}
COLLECTIVE_COLOR, BETWEEN_STAGES_COLOR = COLORS[5], COLORS[4]
BETWEEN_STAGES = ("send", "recv", "send_recv", "broadcast")


def bench_data(record: BenchRecord, path: Path) -> dict[str, Any]:
    """Returns the data for the page's script; times in milliseconds, memory in MiB."""
    return {
        "name": f"{Path(str(record.setup.get('sweep', {}).get('model', ''))).name or 'model'}: layouts side by side",
        "path": str(path.resolve()),
        "written": record.date,
        "command": record.command,
        "where": f"{record.machine.cpu}, {record.machine.cores} cores at {record.commit}",
        "bars": [
            {"title": "Throughput", "unit": "tokens a second", "bars": _bars(record, throughput)},
            {"title": "Memory", "unit": "MiB, the largest rank", "bars": _bars(record, memory)},
        ],
        "points": [_point(row) for row in record.rows],
    }


def throughput(row: BenchRow) -> tuple[float, float, float] | None:
    """Returns median, minimum and maximum, in tokens per second; None where nothing was measured."""
    rate = row.measured.tokens_per_s if row.measured else None
    return None if rate is None else (rate.median, rate.min, rate.max)


def memory(row: BenchRow) -> tuple[float, float, float] | None:
    """Returns the maximum over the ranks in MiB, as (value, minimum, maximum), which are equal."""
    sizes = row.peak_memory
    size = sizes.get("allocated", sizes.get("rss_growth"))
    return None if size is None else (size / 2**20,) * 3


def _bars(record: BenchRecord, value: Any) -> list[dict[str, Any]]:
    found = ((row.point.name, value(row)) for row in record.rows)
    return [{"name": name, "value": of[0], "min": of[1], "max": of[2]} for name, of in found if of is not None]


def _point(row: BenchRow) -> dict[str, Any]:
    m = row.measured
    ranks = [] if m is None else m.by_rank
    begin = min((rank.start_us for rank in ranks), default=0.0)
    return {
        "name": row.point.name,
        "status": row.status,
        "text": "\n".join(describe(row)[1:]),
        "lanes": [
            [
                [name, round((rank.start_us - begin + start) / 1e3, 4), round(length / 1e3, 4), _color(name)]
                for name, start, length in rank.segments
                if name != "other"
            ]
            for rank in ranks
        ],
    }


def _color(name: str) -> str:
    return PHASE_COLORS.get(name) or (BETWEEN_STAGES_COLOR if name in BETWEEN_STAGES else COLLECTIVE_COLOR)
