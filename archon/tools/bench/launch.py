"""Launcher of one point's ranks; turns a failure into a status and one line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

from archon.schema.children import start_child
from archon.tools.bench.bench_record import PointRequest, PointResult, Status
from archon.tools.bench.rank_process import ERROR, RESULT, STACKS

OUTPUT = "output.txt"
# Seconds beyond the time limit for the ranks to start and exit.
GRACE_S = 60.0
# Seconds for torchrun to end its ranks.
TERMINATE_TIMEOUT_S = 40.0
MAX_REASON_LENGTH = 300


def run_ranks(request: PointRequest, ranks: int, threads: int, folder: Path) -> PointResult | tuple[Status, str]:
    """Run `archon.tools.bench.rank_process` in `ranks` processes under torchrun, with `folder` for their files.

    Returns:
        The result of the ranks, or the status and the reason of their failure.
    """
    path = folder / "request.json"
    path.write_text(request.model_dump_json())
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--monitor-interval", "0.2"]
    torchrun += ["--log-dir", str(folder)]  # its own folder of temporary files would outlive a kill
    launch = [*torchrun, "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launch, "archon.tools.bench.rank_process", str(path)]
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    stopped: list[str] = []
    with (folder / OUTPUT).open("w") as output:
        process = start_child(command, environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            process.wait(request.config.time_limit_s)
        except subprocess.TimeoutExpired:
            from archon.parallel.failure import end_stopped_children  # loads torch

            stopped = end_stopped_children(process.pid)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            _terminate(process)
    if stopped:
        return (
            "hung",
            f"{' and '.join(stopped)} was stopped (SIGSTOP) for the rest of {request.config.time_limit_s:g} s",
        )
    result = folder / RESULT
    if process.returncode == 0 and result.exists():
        return PointResult.model_validate_json(result.read_text())
    return failure_reason(folder, process.returncode, request.config.time_limit_s)


def _terminate(process: subprocess.Popen[Any]) -> None:
    """Terminate torchrun, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(TERMINATE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def failure_reason(folder: Path, code: int, limit: float) -> tuple[Status, str]:
    """Return the status and the reason of a failed point, from the files of its ranks in `folder`."""
    output = (folder / OUTPUT).read_text(errors="replace")
    ends = re.findall(r"(?:rank\s*:\s*(\d+) \(local_rank: \d+\)\s*)?exitcode\s*:\s*(-?\d+)", output)
    exit_codes = [int(number) for _, number in ends]
    # A rank killed by a signal is the cause of the errors on other ranks, which torchrun ends by SIGTERM.
    for rank, number in ends:
        if int(number) < 0 and int(number) != -signal.SIGTERM:
            return _signal_failure(-int(number), f"rank {rank}" if rank else "a rank")
    errors = [json.loads(path.read_text()) for path in sorted(folder.glob(ERROR.format("*")))]
    if errors:
        first = min(errors, key=lambda error: error["time"])
        return _status(first["kinds"], first["message"]), one_line(f"{first['kinds'][0]}: {first['message']}")
    if frames := _innermost_frames(folder):
        return "hung", one_line(f"still running after {limit:g} s: {frames}")
    if exit_codes and max(exit_codes) > 0:
        return "failed", f"a rank ended with exit code {max(exit_codes)}"
    if -signal.SIGTERM in (code, *exit_codes):
        return "hung", f"still running after {limit:g} s; the ranks wrote no stacks"
    if code < 0:
        return _signal_failure(-code)
    lines = [line for line in output.splitlines() if line.strip()]
    return "failed", one_line(f"exit code {code}: {lines[-1] if lines else 'no output'}")


def _signal_failure(number: int, rank: str = "a rank") -> tuple[Status, str]:
    """Return the status and the reason for a rank that a signal ended."""
    if number == signal.SIGKILL:
        return "out of memory", f"{rank} was killed by signal 9, most likely out of memory"
    return "failed", f"{rank} was ended by signal {number}"


def _status(kinds: list[str], message: str) -> Status:
    memory = "can't allocate memory" in message or "do not fit the memory" in message
    if memory or "MemoryError" in kinds or "OutOfMemoryError" in kinds:
        return "out of memory"
    if "DeviationError" in kinds:
        return "deviates"
    return "refused" if "UserError" in kinds else "failed"


def _innermost_frames(folder: Path) -> str:
    """Return the innermost Python frame of each rank's main thread, grouped by place."""
    places: dict[str, list[str]] = {}
    for path in sorted(folder.glob(STACKS.format("*"))):
        main_thread = path.read_text().split("(most recent call first):")[-1]
        if frame := re.search(r'File "([^"]*)", line (\d+) in (\S+)', main_thread):
            file, line, function = frame.groups()
            place = f"{function} ({Path(file).name}:{line})"
            places.setdefault(place, []).append(path.name.removeprefix("rank").partition(".")[0])
    return "; ".join(f"rank {', '.join(ranks)} in {place}" for place, ranks in places.items())


def one_line(text: str) -> str:
    """Return the text as one line of at most `MAX_REASON_LENGTH` characters."""
    return textwrap.shorten(text, MAX_REASON_LENGTH, placeholder=" …")
