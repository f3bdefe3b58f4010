"""Starts the ranks of one point, and turns any failure of theirs into a status and one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archon.bench.bench_record import Status
from archon.bench.rank_process import ERROR, RESULT, STACKS, PointRequest, PointResult

OUTPUT = "output.txt"
# Seconds that the ranks have beyond their time limit, to start and to exit by themselves.
GRACE_S = 60.0
# Seconds that torchrun has to end its ranks.
END_S = 40.0
LONGEST_REASON = 300


def run_ranks(request: PointRequest, ranks: int, threads: int, folder: Path) -> PointResult | tuple[Status, str]:
    """Run `archon.bench.rank_process` in `ranks` processes under torchrun.

    Returns the result that they write to `folder`, or the status of their failure and its reason.
    """
    path = folder / "request.json"
    path.write_text(request.model_dump_json())
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--monitor-interval", "0.2"]
    launch = [*torchrun, "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launch, "archon.bench.rank_process", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with (folder / OUTPUT).open("w") as output:
        started = subprocess.Popen(command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            started.wait(request.time_limit_s + GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(started)
    result = folder / RESULT
    if started.returncode == 0 and result.exists():
        return PointResult.model_validate_json(result.read_text())
    return failure_reason(folder, started.returncode, request.time_limit_s)


def _end(started: subprocess.Popen[Any]) -> None:
    """Terminate torchrun, which ends its ranks, if it is running."""
    if started.poll() is not None:
        return
    started.terminate()
    try:
        started.wait(END_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()


def failure_reason(folder: Path, code: int, limit: float) -> tuple[Status, str]:
    """Returns the status of a failed point and the reason, from the files that its ranks wrote to `folder`."""
    output = (folder / OUTPUT).read_text(errors="replace")
    exit_codes = [int(found) for found in re.findall(r"exitcode\s*:\s*(-?\d+)", output)]
    # A rank killed by a signal is the cause, and errors of the others follow from it; torchrun ends them by SIGTERM.
    if signals := [-found for found in exit_codes if found < 0 and found != -signal.SIGTERM]:
        return _ended_by_signal(signals[0])
    errors = [json.loads(path.read_text()) for path in sorted(folder.glob(ERROR.format("*")))]
    if errors:
        first = min(errors, key=lambda error: error["time"])
        return _status(first["kinds"], first["message"]), one_line(f"{first['kinds'][0]}: {first['message']}")
    stacks = {
        path.name.removeprefix("rank").partition(".")[0]: path.read_text() for path in folder.glob(STACKS.format("*"))
    }
    where = _where({rank: text for rank, text in stacks.items() if text.strip()})
    if where:
        return "hung", one_line(f"no end after {limit:g} s: {where}")
    if exit_codes and max(exit_codes) > 0:
        return "failed", f"a rank ended with exit code {max(exit_codes)}"
    if -signal.SIGTERM in (code, *exit_codes):
        return "hung", f"no end after {limit:g} s, and the ranks wrote no stacks"
    if code < 0:
        return _ended_by_signal(-code)
    said = [line for line in output.splitlines() if line.strip()]
    return "failed", one_line(f"exit code {code}: {said[-1] if said else 'without a word'}")


def _ended_by_signal(number: int) -> tuple[Status, str]:
    """Returns the status and the reason of a rank that a signal ended."""
    if number == signal.SIGKILL:
        return "out of memory", "a rank was killed by signal 9, most likely because memory ran out"
    return "failed", f"a rank was ended by signal {number}"


def _status(kinds: list[str], message: str) -> Status:
    memory = "can't allocate memory" in message or "do not fit the memory" in message
    if memory or "MemoryError" in kinds or "OutOfMemoryError" in kinds:
        return "out of memory"
    if "DeviationError" in kinds:
        return "deviates"
    return "refused" if "UserError" in kinds else "failed"


def _where(stacks: Mapping[str, str]) -> str:
    """Innermost Python frame of each rank's main thread; ranks that stand in one place stand together."""
    places: dict[str, list[str]] = {}
    for rank, text in sorted(stacks.items()):
        frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', text.split("(most recent call first):")[-1])
        if frames:
            file, line, function = frames[0]
            places.setdefault(f"{function} ({Path(file).name}:{line})", []).append(rank)
    return "; ".join(f"rank {', '.join(ranks)} in {place}" for place, ranks in places.items())


def one_line(text: str) -> str:
    """Returns the text as one line, shortened to the length of a reason."""
    return textwrap.shorten(text, LONGEST_REASON, placeholder=" …")
