"""`archon report`: a run's curves as PNG and its page, optionally served on loopback while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "name": "report",
    "help": "Write a run's report.html and curves as PNG.\n\nThe page holds the curves and the sampled trajectories, and asks nothing of the network.",
}


def command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="folder of the run")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="where to write; RUN_DIR/report when left out")
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="serve the page at 127.0.0.1:PORT, made anew on each load"),
    ] = None,
) -> None:
    if serve is not None:
        from archon.report.server import serve_report

        serve_report(run_dir, port=serve)
        return
    from archon.report import write_report

    written = write_report(run_dir, out)
    for path in written:
        print(path)
