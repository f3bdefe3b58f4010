"""Runner of a sweep: each point in separate processes, with one row per point even if it fails."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from archon.schema.config import require_output
from archon.schema.private_directory import PrivateDirectory
from archon.tools.bench.bench_record import BenchRecord, BenchRow, Losses, Measurement, PointRequest
from archon.tools.bench.config import Point, SweepConfig
from archon.tools.bench.launch import one_line, run_ranks
from archon.tools.bench.origin import machine, origin
from archon.tools.bench.partition import STEP

# Maximum relative difference between the sum of phases and the wall-clock time, which includes the profiler's start.
PHASE_TOLERANCE = 0.05


def run_sweep(
    config: SweepConfig,
    record: Path | None = None,
    on_row: Callable[[BenchRow], None] = lambda row: None,
    command: str | None = None,
    on_start: Callable[[Point], None] = lambda point: None,
) -> BenchRecord:
    """Measure every point of `config`; return the record.

    A point that is rejected, fails, runs out of memory or hangs has a row with the reason.

    Args:
        config: model and options to vary.
        record: file of the record, written after each point.
        on_row: called with each row.
        command: command that repeats the sweep; by default `archon` and this process's arguments.
        on_start: called with each point before it runs.

    Raises:
        ConfigError: no point can be measured, or the record's folder does not exist; raised before any start.
        LayoutError: a layout is malformed.
    """
    points = config.points()
    sweep = BenchRecord(setup=_setup(config), **origin(command or shlex.join(["archon", *sys.argv[1:]])))
    if record is not None:
        require_output(record, ".json", [config.folder])
    references: dict[tuple[str, str], tuple[str, Losses]] = {}
    for point in points:
        on_start(point)
        row = run_point(config, point, references.get(point.loss_key))
        if row.measured is not None:
            references.setdefault(point.loss_key, (point.layout, row.measured.losses))
        sweep.rows.append(row)
        if record is not None:
            sweep.write(record)
        on_row(row)
    return sweep


def run_point(config: SweepConfig, point: Point, reference: tuple[str, Losses] | None = None) -> BenchRow:
    """Measure one point, compare its losses with `reference` (a layout and its losses), and return its row."""
    from archon.parallel.layout import parse_layout

    ranks = parse_layout(point.layout).world_size
    if reason := config.error(point):
        return BenchRow(point=point, status="refused", reason=one_line(reason))
    request = PointRequest(config=config, point=point, reference=reference)
    threads = config.threads or max(1, machine().cores // ranks)
    with PrivateDirectory("archon-bench-") as folder:
        result = run_ranks(request, ranks, threads, folder.path)
    if isinstance(result, tuple):
        return BenchRow(point=point, status=result[0], reason=result[1])
    notes = _notes(result.measurement)
    return BenchRow(point=point, status="ok", checks=result.checks, measured=result.measurement, notes=notes)


def _notes(measured: Measurement) -> list[str]:
    """Return warnings about ranks with phases that do not add up to the step."""
    notes = []
    for rank, result in enumerate(measured.by_rank):
        total, clock = sum(result.phases_s.values()), result.profiled_s
        if abs(total - clock) > PHASE_TOLERANCE * clock:
            notes.append(f"rank {rank}: phases add up to {total:.4g} s, but the {STEP} took {clock:.4g} s")
    return notes


def _setup(config: SweepConfig) -> dict[str, object]:
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.models import get_model_spec

    hf_config = read_hf_config(str(config.folder))
    get_model_spec(str(hf_config.get("model_type")))  # raises for an unsupported model, before any start
    plain = {name: value for name, value in hf_config.items() if isinstance(value, int | float | str)}
    return {"sweep": config.model_dump(), "model": plain}
