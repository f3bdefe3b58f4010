"""`archon report`: writes a run's HTML page and PNG curves, or serves the page on loopback during the run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from archon.training.runner import Runner

SETTINGS: dict[str, Any] = {
    "name": "report",
    "help": "Write a run's report.html and curves as PNG.\n\nThe page shows curves and sampled trajectories; for a "
    "record of `archon bench`, throughput and memory by layout, and a step of every rank.",
}


def command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="folder of the run, or a record of archon bench")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="where to write; default RUN_DIR/report")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="for a record: also write the profiled steps as a Chrome trace"),
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="serve the page at 127.0.0.1:PORT, updated on each load"),
    ] = None,
) -> None:
    from archon.schema.errors import ConfigError

    if run_dir.is_file():
        from archon.tools.bench import read_record
        from archon.tools.bench.chrome_trace import write_trace
        from archon.tools.report import write_bench_report

        if serve is not None:
            raise ConfigError(f"--serve follows a run, and {run_dir} is a file; leave it out")
        for path in write_bench_report(run_dir, out):
            print(path)
        if trace is not None:
            write_trace(read_record(run_dir), trace)
            print(trace)
        return
    if trace is not None:
        raise ConfigError(f"--trace draws a record of archon bench, and {run_dir} is none; leave it out")
    if serve is not None:
        from archon.tools.report.page_server import serve_report

        serve_report(run_dir, port=serve)
        return
    from archon.tools.report import write_report

    for path in write_report(run_dir, out):
        print(path)


def write_run_report(runner: Runner) -> None:
    """Write the report of the run that just ended, its curves where matplotlib is installed, and log its path."""
    from archon.tools.report import write_report

    if runner.directory.metrics.stat().st_size > 0:
        page, *_ = write_report(runner.directory.path, curves=importlib.util.find_spec("matplotlib") is not None)
        runner.log(f"report: {page}")
