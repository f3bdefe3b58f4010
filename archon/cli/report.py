"""`archon report`: write a run's HTML page and PNG curves, or serve the page during the run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archon.checkpoint.atomic import write_text
from archon.schema.config import require_output

if TYPE_CHECKING:
    from pydantic import BaseModel

    from archon.training.runner import Runner

SETTINGS: dict[str, Any] = {
    "name": "report",
    "help": "Write a run's report.html and curves as PNG.\n\nThe page shows curves and sampled trajectories. A second "
    "run makes a page of both: settings that differ, curves, prompts that got better and worse. For an "
    "`archon bench` record it shows throughput and memory by layout, and one step of every rank.",
}


def command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="run directory, or an archon bench record")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER_RUN]", help="second run, to compare with the first")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="output folder; default RUN_DIR/report")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="for a record: also write a Chrome trace of the profiled steps"),
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="serve the page at 127.0.0.1:PORT; every load updates it"),
    ] = None,
) -> None:
    """Write or serve the report of a run."""
    from archon.schema.errors import ConfigError

    if other is not None:
        from archon.tools.report import write_comparison

        if trace is not None or serve is not None:
            option = "--serve" if trace is None else "--trace"
            raise ConfigError(f"{option} needs a single argument; leave {other} out")
        print(write_comparison(run_dir, other, out))
        return
    if run_dir.is_file():
        from archon.tools.bench import read_record
        from archon.tools.bench.chrome_trace import write_trace
        from archon.tools.report import write_bench_report

        if serve is not None:
            raise ConfigError(f"--serve requires a run directory; {run_dir} is a file")
        if trace is not None:
            require_output(trace, ".json", [run_dir])
        for path in write_bench_report(run_dir, out):
            print(path)
        if trace is not None:
            write_trace(read_record(run_dir), trace)
            print(trace)
        return
    if trace is not None:
        raise ConfigError(f"--trace requires an archon bench record; {run_dir} is not a file")
    if serve is not None:
        from archon.tools.report.page_server import serve_report

        serve_report(run_dir, port=serve)
        return
    from archon.tools.report import write_report

    for path in write_report(run_dir, out):
        print(path)


def write_run_report(runner: Runner, config: BaseModel) -> None:
    """Write the report of a finished run and the card of its export; log both with the command to type next.

    The report has curves as PNG if matplotlib is installed.
    """
    from archon.checkpoint.hf_export import MODEL_CARD
    from archon.tools.report import load_run, write_report
    from archon.tools.report.summary import model_card, next_command

    export = runner.directory.export
    if runner.directory.metrics.stat().st_size > 0:
        page, *_ = write_report(runner.directory.path, curves=importlib.util.find_spec("matplotlib") is not None)
        runner.log(f"report: {page}")
        if export.is_dir():
            write_text(export / MODEL_CARD, model_card(load_run(runner.directory.path, trajectories=False)))
    if export.is_dir():
        runner.log(f"export: {export}")
        runner.log(f"next: {next_command(config.model_dump(mode='json'), export)}")
