"""Chrome trace of every rank's profiled step, for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archon.tools.bench.bench_record import BenchRecord

# Difference between the process ids of the first ranks of successive points.
PROCESSES_PER_POINT = 100_000


def write_trace(record: BenchRecord, path: Path) -> None:
    """Write the trace of a record; every rank of a measured point is a process."""
    path.write_text(json.dumps({"traceEvents": list(_events(record)), "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(record: BenchRecord) -> Iterator[dict[str, Any]]:
    """Yield the events; times are microseconds since the start of the point's first rank."""
    for number, row in enumerate(record.rows):
        if row.measured is None:
            continue
        begin = min(rank.start_us for rank in row.measured.by_rank)
        for rank, result in enumerate(row.measured.by_rank):
            process = number * PROCESSES_PER_POINT + rank
            name = f"{row.point.name}, rank {rank}"
            yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
            for phase, start, length in result.segments:
                at = result.start_us - begin + start
                yield {"ph": "X", "pid": process, "tid": 0, "name": phase, "cat": "step", "ts": at, "dur": length}
