"""The profiled step of every rank as a Chrome trace, for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archon.bench.record import BenchRecord

# Process numbers of a point's ranks begin at a multiple of this.
POINT = 100_000


def write_trace(record: BenchRecord, path: Path) -> None:
    """One process a rank of each measured point."""
    path.write_text(json.dumps({"traceEvents": list(trace_events(record)), "displayTimeUnit": "ms"}), encoding="utf-8")


def trace_events(record: BenchRecord) -> Iterator[dict[str, Any]]:
    """Times in microseconds from the moment a point's first rank began its step."""
    for number, row in enumerate(record.rows):
        if row.measured is None:
            continue
        begin = min(rank.start_us for rank in row.measured.by_rank)
        for rank, of in enumerate(row.measured.by_rank):
            process = number * POINT + rank
            name = f"{row.point.name}, rank {rank}"
            yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
            for phase, start, length in of.segments:
                at = of.start_us - begin + start
                yield {"ph": "X", "pid": process, "tid": 0, "name": phase, "cat": "step", "ts": at, "dur": length}
