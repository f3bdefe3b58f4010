"""When one rank fails all end within seconds, and one of them says why: real processes under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from archon.checkpoint.native import load_latest
from archon.training.metrics import read_jsonl
from tests.distributed.failing import STEP
from tests.distributed.runs import make_inputs

pytestmark = pytest.mark.xdist_group("ranks")

TIMEOUT_SECONDS = 8
"""Of a collective; a rank that is missed ends the others after it."""
GRACE_SECONDS = 30
"""From the last record to the end of torchrun, on a busy machine."""


def torchrun(*arguments: str, restarts: int = 0, module: bool = True) -> tuple[int, str, float]:
    """Exit code, output and the time at which it ended; the first argument is a module, or a script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), *(["-m"] if module else [])]
    done = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, time.time()


def fail(folder: Path, how: str) -> tuple[int, str]:
    """Rank 1 goes wrong at `STEP` of a run; exit code and output. The run must end soon after."""
    make_inputs(folder)
    code, output, ended = torchrun("tests.distributed.failing", how, "1", str(folder), str(TIMEOUT_SECONDS))
    last = read_jsonl(folder / "run" / "metrics.jsonl")[-1]
    assert last["step"] == STEP
    assert ended - last["time"] < TIMEOUT_SECONDS + GRACE_SECONDS, output
    return code, output


def found(pattern: str, text: str) -> str:
    """The first match of the pattern, or the pattern."""
    match = re.search(pattern, text)
    return match[0] if match else pattern


@pytest.mark.slow
def test_the_traceback_of_the_rank_that_raised_and_no_other(tmp_path: Path) -> None:
    code, output = fail(tmp_path, "raise")
    assert code == 1
    assert "archon: rank 1 failed:\nTraceback" in output
    assert output.count("ArithmeticError: this rank has had enough") == 1
    assert output.count("archon: rank") == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_takes_the_others_with_it(tmp_path: Path) -> None:
    code, output = fail(tmp_path, "kill")
    assert code == 1
    assert "Signal 9 (SIGKILL)" in output  # torchrun's own report
    failure_file = tmp_path / "run" / "failure.txt"
    assert [line for line in output.splitlines() if line.startswith("archon:")] == [
        found(r"archon: rank 1 \(process \d+ on \S+\) died; all ranks stop", output),
        f"archon: full output: {failure_file}",
        found(r"archon: to continue after step-0000000[123], start the same command with resume=true", output),
    ]
    assert output.count("Traceback") == 1, "torchrun's"
    assert "archon: rank 0: a collective failed:\nTraceback" in failure_file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_starts_the_ranks_again_after_a_kill_and_they_resume(tmp_path: Path, rank: str) -> None:
    make_inputs(tmp_path)
    arguments = ("kill once", rank, str(tmp_path), "60", str(STEP + 2))
    code, output, _ = torchrun("tests.distributed.failing", *arguments, restarts=1)
    assert code == 0, output
    assert "exitcode: -9" in output or "(exitcode: -9)" in output
    assert re.search(r"resuming after step \d", output), "the second start"
    assert re.search(rf"archon: rank {rank} .*died; torchrun starts all ranks again \(full output: ", output)
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [*range(1, STEP + 3)]


@pytest.mark.slow
def test_a_mistake_is_one_line_once(tmp_path: Path) -> None:
    code, output = fail(tmp_path, "mistake")
    assert code == 1
    assert output.count("archon: row 7 is not a row; fix it\n") == 1
    assert "DatasetError" not in output
    assert "exitcode  : 2" in output


@pytest.mark.slow
def test_a_rank_that_is_stuck_ends_the_run_after_the_time_limit(tmp_path: Path) -> None:
    code, output = fail(tmp_path, "hang")
    assert code == 1
    assert output.count("archon: rank 0: a collective failed: another rank ended, or came later than timeout_s") == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("how", ["stop process", "stop process in a save", "stop process in a push"])
def test_a_stopped_rank_ends_the_run_after_the_time_limit(tmp_path: Path, how: str, rank: str) -> None:
    """Saves and pushes wait for 30 minutes, and torchrun for 30 s for a process that does not react to SIGTERM."""
    make_inputs(tmp_path)
    code, output, ended = torchrun("tests.distributed.failing", how, rank, str(tmp_path), str(TIMEOUT_SECONDS))
    stopped_at = (tmp_path / "stopped").stat().st_mtime
    assert code == 1
    reason = "is stopped \\(SIGSTOP\\)|has not run for 8 s: it is stopped, or hangs"
    assert re.search(rf"archon: rank {rank} \(process \d+ on \S+\) ({reason}); all ranks stop\n", output), output
    assert output.count("archon: ") == 3
    assert TIMEOUT_SECONDS / 2 < ended - stopped_at < TIMEOUT_SECONDS + 10, output


@pytest.mark.slow
def test_a_rank_stopped_while_it_starts_ends_the_others_after_the_time_limit(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    arguments = ("stop process at the start", "1", str(tmp_path), str(TIMEOUT_SECONDS))
    code, output, ended = torchrun("tests.distributed.failing", *arguments)
    assert code == 1
    assert output.count("archon: process 0 of 2 cannot join the others within 8 s") == 1
    assert ended - (tmp_path / "joining").stat().st_mtime < TIMEOUT_SECONDS + 10, output


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_one_step_saved(tmp_path: Path) -> None:
    code, _ = fail(tmp_path, "stop")
    assert code == 0
    found = load_latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found[0] == STEP


@pytest.mark.slow
def test_a_wrong_number_of_processes_is_one_line_once(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    overrides = [f"run_dir={tmp_path / 'run'}", f"model.path={tmp_path / 'blank'}", f"train_data.path={tmp_path}"]
    code, output, _ = torchrun("archon", "sft", *overrides, "model.layout=d2t2", "model.device=cpu")
    assert code == 1
    assert output.count("the layout needs 4 processes, but 2 are running; start it with torchrun") == 1
    assert "exitcode  : 2" in output
    assert not (tmp_path / "run").exists()


def test_a_command_that_cannot_be_read_is_told_once() -> None:
    code, output, _ = torchrun("archon", "sft", "--no-such-option")
    assert code == 1
    assert output.count("no-such-option") == 1, output
    assert "exitcode  : 2" in output
