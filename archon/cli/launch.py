"""`archon launch`: start a command on several ranks, and report a lost rank in at most three lines."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archon.schema.capacity import require_rank_capacity
from archon.schema.children import forget_folder, keep_folder
from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SETTINGS: dict[str, Any] = {
    "name": "launch",
    "help": "Start a command on several ranks.\n\n"
    "For example `archon launch --nproc-per-node 4 sft --config FILE.yaml`. "
    "The same as `torchrun … -m archon COMMAND`. If a rank is lost, it prints the rank with its signal, the file with "
    "the output of all ranks, and how to continue, instead of torchrun's report.",
    "context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": False},
}
LOG_FILE = "torchrun.log"
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a rank that a signal asked to stop. It has saved its run, if it trains one."""
RESUME_ADVICE = "to continue after the last checkpoint, start the same command with resume=true"
"""The advice if no rank has lived to name the checkpoint."""


def command(
    arguments: Annotated[list[str], typer.Argument(metavar="COMMAND…", help="command of archon with its arguments")],
    nproc_per_node: Annotated[int, typer.Option(metavar="N", min=1, help="ranks on this host")] = 1,
    nnodes: Annotated[int, typer.Option(metavar="N", min=1, help="hosts; start the same command on each")] = 1,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="where the hosts meet; required for several hosts")
    ] = None,
    rdzv_id: Annotated[str | None, typer.Option(metavar="ID", help="name of the run, the same on all hosts")] = None,
    max_restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="restarts of all ranks after a failure; use resume=true")
    ] = 0,
) -> None:
    """Start a command of archon on several ranks."""
    if nnodes > 1 and (rdzv_endpoint is None or rdzv_id is None):
        raise ConfigError("several hosts need --rdzv-endpoint HOST:PORT and --rdzv-id ID, the same on all of them")
    if nnodes * nproc_per_node == 1 and not max_restarts:
        os.execv(sys.executable, [sys.executable, "-m", "archon", *arguments])  # one rank needs no launcher
    require_rank_capacity(nproc_per_node)
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the default makes a temporary folder, and leaves it
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=nproc_per_node,
        run_id=rdzv_id or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=rdzv_endpoint or "localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    raise typer.Exit(launch(config, ["-u", "-m", "archon", *arguments]))


def launch(config: Any, arguments: Sequence[str]) -> int:
    """Run Python with `arguments` in the ranks of a `LaunchConfig`; return the exit code of the first failed rank."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    from archon.parallel.failure import LAUNCHER

    folder = Path(tempfile.gettempdir()) / f"archon-launch-{os.urandom(8).hex()}"
    keep_folder(folder)  # it is removed if this process is killed
    folder.mkdir(mode=0o700)
    os.environ[LAUNCHER] = f"{os.getpid()} {folder}"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default: ranks share the cores
    config.logs_specs = DefaultLogsSpecs(log_dir=str(folder))
    _log_to(folder / LOG_FILE)
    is_kept = False
    try:
        elastic_launch(config, sys.executable)(*arguments)
        return 0
    except ChildFailedError as error:
        code = _first_failure(error.failures)[1].exitcode
        # A signal to one rank stops all ranks. They have saved and logged it, so there is no failure to report.
        if code not in STOPPED:
            is_kept = _report(folder, error.failures, str(error))
        return code if code > 0 else 1
    except SignalException as error:  # the ranks have saved and ended
        return 128 + error.sigval
    except RendezvousError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the launchers of {config.max_nodes} hosts cannot meet at {config.rdzv_endpoint} ({reason}); start the "
            "same command on every host, and check the address and the port"
        ) from error
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        forget_folder(folder)


def _log_to(path: Path) -> None:
    """Send the log of torch's launcher to a file."""
    handler = logging.FileHandler(path, delay=True)
    for name in ("torch", "torch.distributed"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False


def _first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank and the failure of the first lost rank: one that a signal ended, since others fail after it."""
    return min(
        failures.items(),
        key=lambda item: (item[1].exitcode >= 0 or item[1].exitcode == -signal.SIGTERM, item[1].timestamp),
    )


def _report(folder: Path, failures: dict[int, ProcessFailure], torch_report: str) -> bool:
    """Print why the ranks ended, unless a rank has printed its own error. Returns whether `folder` must be kept."""
    from archon.parallel.failure import FAILURE_FILE, REPORT_FILE, RUN_FILE

    report, run_dir = {}, ""
    with suppress(FileNotFoundError):
        report = json.loads((folder / REPORT_FILE).read_text())
    if "error" in report:
        return False
    with suppress(FileNotFoundError):
        run_dir = (folder / RUN_FILE).read_text(errors="surrogateescape")
    target = Path(run_dir) if run_dir and Path(run_dir).is_dir() else folder
    log, output = folder / LOG_FILE, f"full output: {target / FAILURE_FILE}"
    try:
        with (target / FAILURE_FILE).open("a", errors="backslashreplace") as file:
            file.write((log.read_text(errors="replace") if log.exists() else "") + torch_report + "\n")
    except OSError as error:  # a full disk
        output = f"{target / FAILURE_FILE}: {error.strerror}, so the output of the ranks is incomplete"
    lines = [_reason(report, failures), output, *([report.get("advice") or RESUME_ADVICE] if run_dir else [])]
    sys.stderr.write("".join(f"archon: {line}\n" for line in lines))
    return target == folder


def _reason(report: dict[str, Any], failures: dict[int, ProcessFailure]) -> str:
    rank, failure = _first_failure(failures)
    name = f"rank {rank} (process {failure.pid} on {socket.gethostname()})"
    if "reason" in report and (report["stopped"] or failure.exitcode >= 0):
        return f"{report['reason']}; all ranks stop"
    if failure.exitcode >= 0:
        return f"{name} ended with exit code {failure.exitcode} and without a message; all ranks stop"
    number, hint = -failure.exitcode, ", perhaps for lack of memory" if failure.exitcode == -signal.SIGKILL else ""
    return f"{name} was killed by signal {number} ({failure.signal_name()}){hint}; all ranks stop"
