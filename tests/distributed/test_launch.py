"""`archon launch`: a lost rank is told in at most three lines, and everything else is in a file that they name."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from archon.cli.launch import RESUME_ADVICE, _first_failure, launch
from archon.parallel.failure import LAUNCHER
from archon.training.metrics import read_jsonl
from tests.distributed.runs import make_inputs

pytestmark = pytest.mark.xdist_group("ranks")

NAME = r"rank 1 \(process \d+ on \S+\)"
TIMEOUT_SECONDS = 8


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what the launcher changes in its process; temporary folders are in `tmp_path`."""
    monkeypatch.setenv(LAUNCHER, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loggers = [logging.getLogger(name) for name in ("torch", "torch.distributed")]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for logger, (handler, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handler, propagate
    for number, action in zip(numbers, handlers, strict=True):
        signal.signal(number, action)


def start(code: str, max_restarts: int = 0) -> int:
    """Launch two ranks that run Python code without torch; `rank`, `os`, `signal`, `time` and `folder` are defined."""
    prelude = "import os, signal, sys, time\nrank = os.environ['RANK']\n"
    prelude += f"folder = os.environ['{LAUNCHER}'].partition(' ')[2]\n"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.05,
    )
    return launch(config, ["-c", prelude + code])


OTHERS = "time.sleep(60 if rank == '0' else 0)\n"
RUN = "open(f'{folder}/run', 'w').write('RUN')\n"
REPORT = "open(f'{{folder}}/report.json', 'w').write('{}')\n"
KILL = OTHERS + "os.kill(os.getpid(), 9)"
QUICK = ("kill", "stopped")
LOSSES = {
    "kill": (KILL, 1, rf"{NAME} was killed by signal 9 \(SIGKILL\), perhaps for lack"),
    "crash": (OTHERS + "os.kill(os.getpid(), 11)", 1, rf"{NAME} was killed by signal 11 \(SIGSEGV\); all ranks stop"),
    "exit": (OTHERS + "os._exit(3)", 3, rf"{NAME} ended with exit code 3 and without a message; all ranks stop"),
    "others fail first": (
        "time.sleep(0.2 if rank == '1' else 0)\nos._exit(4) if rank == '0' else os.kill(os.getpid(), 9)",
        4,
        r"rank 0 \(process \d+ on \S+\) ended with exit code 4",
    ),
    "stopped": (
        REPORT.format('{"reason": "rank 1 is stopped", "stopped": true}') + KILL,
        1,
        "rank 1 is stopped",
    ),
}


@pytest.mark.parametrize("how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.slow) for how in LOSSES])
def test_a_lost_rank_is_named_with_its_signal(
    launcher: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    code, exit_code, message = LOSSES[how]
    assert start(code) == exit_code
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert re.match(f"archon: {message}", lines[0])
    file = Path(lines[1].removeprefix("archon: full output: "))
    assert "ChildFailedError" in file.read_text() or "FAILED" in file.read_text()


@pytest.mark.parametrize(
    ("codes", "first"),
    [([1, -9], 1), ([-15, -9], 1), ([2, -15], 0), ([1, 1], 0), ([-11, -9], 0)],
)
def test_a_rank_that_a_signal_ended_is_the_cause(codes: list[int], first: int) -> None:
    """torchrun ends the other ranks by SIGTERM, or they end because of a failed collective."""
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in enumerate(codes)}
    for rank, failure in failures.items():
        failure.timestamp = rank
    assert _first_failure(failures)[0] == first


def test_the_output_of_a_run_is_in_its_folder(
    launcher: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert start(RUN.replace("RUN", str(run)) + KILL) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[1:] == [f"archon: full output: {run / 'failure.txt'}", f"archon: {RESUME_ADVICE}"]
    assert "Signal 9 (SIGKILL)" in (run / "failure.txt").read_text()
    assert not list(tmp_path.glob("archon-launch-*"))


ERROR = REPORT.format('{"error": true}') + "sys.stderr.write('archon: x\\n')\nos._exit(2)"


STOP = "time.sleep(0.2 * int(rank))\nos._exit(143)"


@pytest.mark.parametrize(
    ("code", "expected"), [(ERROR, 2), ("pass", 0), (STOP, 143)], ids=["error", "no error", "asked to stop"]
)
def test_a_rank_with_an_error_of_its_own_has_the_last_word(
    launcher: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, expected: int
) -> None:
    assert start(code) == expected
    assert set(capfd.readouterr().err.splitlines()) == ({"archon: x"} if expected == 2 else set())
    assert not list(tmp_path.glob("archon-launch-*"))


@pytest.mark.slow
def test_all_ranks_are_started_again(launcher: None, capfd: pytest.CaptureFixture[str]) -> None:
    code = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    os.kill(os.getpid(), 9)\nprint('again', rank)"
    assert start(code, max_restarts=1) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["again 0", "again 1"]


def ranks_of(process: int) -> dict[int, int]:
    """The process ids of the ranks that a launcher has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                found |= {int(item[5:]): int(folder.name) for item in environment if item.startswith("RANK=")}
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_run_that_loses_a_rank_prints_three_lines(tmp_path: Path, rank: int, number: signal.Signals) -> None:
    make_inputs(tmp_path)
    values = {"path": tmp_path / "blank", "init_from_scratch": "true", "device": "cpu", "layout": "d2"}
    values |= {"optimizer.lr": 1e-3, "timeout_s": TIMEOUT_SECONDS}
    overrides = [f"run_dir={tmp_path / 'run'}", f"train_data.path={tmp_path}", "batch_size=8", "total_steps=100000"]
    overrides += ["checkpoint.every=2", *(f"model.{key}={value}" for key, value in values.items())]
    command = [sys.executable, "-m", "archon", "launch", "--nproc-per-node", "2", "sft", *overrides]
    records, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not records.exists() or len(read_jsonl(records)) < 4:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        lost = ranks_of(process.pid)[rank]
        os.kill(lost, number)
        began = time.monotonic()
        errors = process.communicate(timeout=120)[1]
        seconds = time.monotonic() - began
    first, second, third = errors.splitlines()
    reason = r"was killed by signal 9 \(SIGKILL\), perhaps for lack of memory"
    if number == signal.SIGSTOP:
        reason = r"(is stopped \(SIGSTOP\)|has not run for 8 s: it is stopped, or hangs)"
    assert re.fullmatch(rf"archon: rank {rank} \(process {lost} on \S+\) {reason}; all ranks stop", first), errors
    assert second == f"archon: full output: {tmp_path / 'run' / 'failure.txt'}"
    assert re.fullmatch(r"archon: to continue after step-\d+, start the same command with resume=true", third)
    assert seconds < 10 + (TIMEOUT_SECONDS if number == signal.SIGSTOP else 0)
    assert not ranks_of(process.pid)


@pytest.mark.slow
def test_launchers_of_two_hosts_start_one_run(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "archon", "launch", "--nnodes", "2", "--rdzv-id", "two", "--rdzv-endpoint"]
    command += [f"localhost:{port}", "doctor", str(tmp_path / "blank"), "--layout", "d2", "--fresh"]
    command += ["--tokens", "64", "--dtype", "float32"]
    hosts = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    outputs = [host.communicate(timeout=180)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert sum("replicas after a step: bitwise equal" in output for output in outputs) == 1


@pytest.mark.slow
def test_the_command_leaves_no_temporary_folder_and_refuses_ranks_that_do_not_fit(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "archon", "launch", "--nproc-per-node"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([*run, "2", "sft", "--help"], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert not [*tmp_path.iterdir()]
    many = subprocess.run([*run, "100000", "sft"], env=environment, capture_output=True, text=True, timeout=20)
    assert many.returncode == 2 and "100000 ranks do not fit this machine" in many.stderr
