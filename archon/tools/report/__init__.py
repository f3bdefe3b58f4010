"""Reports of runs: curves as PNG, and a self-contained HTML page with curves and sampled trajectories."""

from __future__ import annotations

from pathlib import Path

from archon.checkpoint.atomic import write_text
from archon.tools.bench.bench_record import read_record
from archon.tools.report.compare import write_comparison
from archon.tools.report.curves import draw_curves
from archon.tools.report.page import render_bench, render_page
from archon.tools.report.run_data import load_run

__all__ = ["load_run", "render_bench", "render_page", "write_bench_report", "write_comparison", "write_report"]


def write_report(run_dir: str | Path, out: str | Path | None = None, *, curves: bool = True) -> list[Path]:
    """Write `report.html` and one PNG per panel to `out` (default `run_dir/report`); return the written files.

    The page does not need matplotlib and is written first.

    Raises:
        ConfigError: `run_dir` has no metrics.
        UserError: `curves` is True and matplotlib (the extra `plots`) is not installed.
    """
    run = load_run(run_dir)
    folder = Path(out) if out is not None else run.path / "report"
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    write_text(page, render_page(run))
    return [page, *draw_curves(run, folder)] if curves else [page]


def write_bench_report(record: str | Path, out: str | Path | None = None) -> list[Path]:
    """Write the page of a sweep's record next to it, or to the folder `out`; return the written files.

    Raises:
        ConfigError: the file is no record.
    """
    path = Path(record)
    page = (Path(out) / "report.html") if out is not None else path.with_suffix(".html")
    text = render_bench(read_record(path), path)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, text)
    return [page]
