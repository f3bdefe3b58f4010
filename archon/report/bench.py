"""What the page of a sweep shows: throughput and memory of each point, and a step of every rank as a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.bench.record import BenchRecord, Row
from archon.bench.table import describe
from archon.report.curves import COLOURS

# The page's colours by phase; a collective has one of the rest.
PHASE_COLOURS = {"forward": COLOURS[0], "backward": COLOURS[1], "head": COLOURS[3], "optimizer": COLOURS[2]}
COLLECTIVE_COLOUR, BETWEEN_COLOUR = COLOURS[5], COLOURS[4]
BETWEEN = ("send", "recv", "send_recv", "broadcast")


def bench_data(record: BenchRecord, path: Path) -> dict[str, Any]:
    """As the page's script reads it; times in milliseconds, memory in MiB."""
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


def throughput(row: Row) -> tuple[float, float, float] | None:
    """Median, smallest and largest, in tokens a second."""
    rate = row.measured.tokens_per_s if row.measured else None
    return None if rate is None else (rate.median, rate.min, rate.max)


def memory(row: Row) -> tuple[float, float, float] | None:
    """The peak of any rank, in MiB, thrice: it has no spread."""
    sizes = row.peak_memory
    size = sizes.get("allocated", sizes.get("rss_growth"))
    return None if size is None else (size / 2**20,) * 3


def _bars(record: BenchRecord, value: Any) -> list[dict[str, Any]]:
    found = ((row.point.name, value(row)) for row in record.rows)
    return [{"name": name, "value": of[0], "min": of[1], "max": of[2]} for name, of in found if of is not None]


def _point(row: Row) -> dict[str, Any]:
    m = row.measured
    ranks = [] if m is None else m.by_rank
    begin = min((rank.start_us for rank in ranks), default=0.0)
    return {
        "name": row.point.name,
        "status": row.status,
        "text": "\n".join(describe(row)[1:]),
        "lanes": [
            [
                [name, round((rank.start_us - begin + start) / 1e3, 4), round(length / 1e3, 4), _colour(name)]
                for name, start, length in rank.segments
                if name != "other"
            ]
            for rank in ranks
        ],
    }


def _colour(name: str) -> str:
    return PHASE_COLOURS.get(name) or (BETWEEN_COLOUR if name in BETWEEN else COLLECTIVE_COLOUR)
