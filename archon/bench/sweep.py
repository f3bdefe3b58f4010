"""A sweep: each point in processes of its own, a row for each, whatever becomes of it."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from archon.bench.config import Point, SweepConfig
from archon.bench.launch import one_line, run_ranks
from archon.bench.origin import machine, origin
from archon.bench.partition import STEP
from archon.bench.record import BenchRecord, Losses, Measurement, Row
from archon.bench.worker import Request
from archon.schema.files import require_folder

# What the phases may add up to beside the step by the clock: a profile's first and last moments.
PHASE_TOLERANCE = 0.05


def run_sweep(
    config: SweepConfig,
    record: Path | None = None,
    said: Callable[[Row], None] = lambda row: None,
    command: str | None = None,
    starting: Callable[[Point], None] = lambda point: None,
) -> BenchRecord:
    """Measure every point of `config`.

    Args:
        record: the file to write, anew after each point.
        said: told of each row as it comes.
        command: what a reader runs to have the same again; by default `archon` and this process's arguments.
        starting: told of each point before it runs.

    Raises ConfigError or LayoutError for what no point could honour, and ConfigError for a record without a folder,
    before anything is started. A point that is refused, fails, runs out of memory or hangs becomes a row.
    """
    points = config.points()
    made = BenchRecord(setup=_setup(config), **origin(command or shlex.join(["archon", *sys.argv[1:]])))
    if record is not None:
        require_folder(record)
    references: dict[tuple[str, str], tuple[str, Losses]] = {}
    for point in points:
        starting(point)
        row = run_point(config, point, references.get(point.same_loss))
        if row.measured is not None:
            references.setdefault(point.same_loss, (point.layout, row.measured.losses))
        made.rows.append(row)
        if record is not None:
            made.write(record)
        said(row)
    return made


def run_point(config: SweepConfig, point: Point, reference: tuple[str, Losses] | None = None) -> Row:
    """One row, whose losses are compared with the `reference`'s: a layout and what it found."""
    from archon.parallel.layout import parse_layout

    ranks = parse_layout(point.layout).world_size
    if reason := config.refusal(point):
        return Row(point=point, status="refused", reason=one_line(reason))
    request = Request(
        engine=config.engine_config(point),
        point=point,
        steps=config.steps,
        warmup=config.warmup,
        peak_tflops=config.peak_tflops,
        reference=reference,
        time_limit_s=config.time_limit_s,
    )
    threads = config.threads or max(1, machine().cores // ranks)
    with tempfile.TemporaryDirectory(prefix="archon-bench-") as folder:
        found = run_ranks(request, ranks, threads, Path(folder))
    if isinstance(found, tuple):
        return Row(point=point, status=found[0], reason=found[1])
    return Row(
        point=point, status="ok", checks=found.checks, measured=found.measurement, notes=_notes(found.measurement)
    )


def _notes(measured: Measurement) -> list[str]:
    """What a reader should know before trusting the phases."""
    notes = []
    for rank, of in enumerate(measured.by_rank):
        whole = sum(of.phases_s.values())
        if abs(whole - of.profiled_s) > PHASE_TOLERANCE * of.profiled_s:
            notes.append(
                f"rank {rank}: the phases add up to {whole:.4g} s, the {STEP} took {of.profiled_s:.4g} s by the clock"
            )
    return notes


def _setup(config: SweepConfig) -> dict[str, object]:
    from archon.checkpoint.hf_io import read_hf_config
    from archon.models import get_model_spec

    hf_config = read_hf_config(str(config.folder))
    get_model_spec(str(hf_config.get("model_type")))  # which another family has not
    plain = {name: value for name, value in hf_config.items() if isinstance(value, int | float | str)}
    return {"sweep": config.model_dump(), "model": plain}
