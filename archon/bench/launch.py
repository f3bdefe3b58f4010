"""Ranks of one point, started and outlived: whatever becomes of them, what comes back is a result or one line."""

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

from archon.bench.record import Status
from archon.bench.worker import ERROR, RESULT, STACKS, Request, Result

OUTPUT = "output.txt"
# Seconds that ranks have beyond their limit, to start and to end by themselves.
GRACE_S = 60.0
# Seconds that torchrun needs to end its ranks.
END_S = 40.0
LONGEST_REASON = 300


def run_ranks(request: Request, ranks: int, threads: int, folder: Path) -> Result | tuple[Status, str]:
    """Start `archon.bench.worker` on `ranks` processes under torchrun, wait, and read what they leave in `folder`."""
    path = folder / "request.json"
    path.write_text(request.model_dump_json())
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--monitor-interval", "0.2"]
    launch = [*torchrun, "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launch, "archon.bench.worker", str(path)]
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
        return Result.model_validate_json(result.read_text())
    return explain(folder, started.returncode, request.time_limit_s)


def _end(started: subprocess.Popen[Any]) -> None:
    """End torchrun, which ends its ranks; idempotent."""
    if started.poll() is not None:
        return
    started.terminate()
    try:
        started.wait(END_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()


def explain(folder: Path, code: int, limit: float) -> tuple[Status, str]:
    """Why a point failed, from what its ranks left behind."""
    output = (folder / OUTPUT).read_text(errors="replace")
    told = [int(found) for found in re.findall(r"exitcode\s*:\s*(-?\d+)", output)]
    # What the other ranks say of one that ended by a signal is no cause; torchrun ends them by SIGTERM.
    if signals := [-found for found in told if found < 0 and found != -signal.SIGTERM]:
        return _ended(signals[0])
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
    if told and max(told) > 0:
        return "failed", f"a rank ended with exit code {max(told)}"
    if -signal.SIGTERM in (code, *told):
        return "hung", f"no end after {limit:g} s, and the ranks could not say where they stood"
    if code < 0:
        return _ended(-code)
    said = [line for line in output.splitlines() if line.strip()]
    return "failed", one_line(f"exit code {code}: {said[-1] if said else 'without a word'}")


def _ended(number: int) -> tuple[Status, str]:
    """What a rank's end by a signal means."""
    if number == signal.SIGKILL:
        return "out of memory", "a rank was killed by signal 9, most likely for memory"
    return "failed", f"a rank ended by signal {number}"


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
    """Joined and cut."""
    return textwrap.shorten(text, LONGEST_REASON, placeholder=" …")
