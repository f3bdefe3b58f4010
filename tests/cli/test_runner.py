"""A run holds its directory alone, and a signal ends it after its step, saved."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager

import pytest
import yaml
from rich.console import Console

from archon.cli.app import user_message
from archon.schema.config import OptimizerConfig
from archon.schema.errors import ConfigError
from archon.training import progress as progress_module
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner
from tests.warm import run_code, started_code

LOOP = """
import sys, time
from archon.training.runner import Runner
from archon.schema.config import OptimizerConfig
with Runner({run_dir!r}, OptimizerConfig()) as runner:
    step = 0
    while step < 1000 and not runner.stop_requested:
        step += 1
        print("step", step, flush=True)
        deadline = time.monotonic() + {seconds}
        while time.monotonic() < deadline:
            time.sleep(0.01)
        runner.metrics.write(step, {{"loss": 1.0}})
    print("saved", step, flush=True)
sys.exit(runner.exit_code)
"""


@contextmanager
def loop(run_dir, seconds_a_step):
    with started_code(LOOP.format(run_dir=str(run_dir), seconds=seconds_a_step)) as process:
        assert process.stdout.readline() == "step 1\n"
        yield process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_finishes_the_step_and_saves(tmp_path, number, code):
    with loop(tmp_path / "run", 0.2) as process:
        process.send_signal(number)
        assert process.wait(timeout=20) == code
        assert process.stdout.read().endswith("saved 1\n") and "saving, then exiting" in process.stderr.read()
    assert [record["step"] for record in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1]


def test_the_second_signal_leaves_at_once(tmp_path):
    with loop(tmp_path / "run", 60) as process:
        process.send_signal(signal.SIGTERM)
        assert "press Ctrl-C again to exit now" in process.stderr.readline() + process.stderr.readline()
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130 and time.monotonic() - asked < 10
        assert "saved" not in process.stdout.read() and "exiting now" in process.stderr.read()


def test_a_run_directory_is_held_by_one_run_at_a_time(tmp_path):
    with loop(tmp_path / "run", 60) as process, pytest.raises(ConfigError, match=f"in use by process {process.pid}"):
        Runner(tmp_path / "run", OptimizerConfig(), resume=True).__enter__()
    with Runner(tmp_path / "run", OptimizerConfig(), resume=True):
        pass  # a killed run leaves no lock behind


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with Runner(tmp_path / "run", OptimizerConfig()):
        pass
    assert "the file system does not support locks (No locks available)" in caplog.text


def test_a_run_is_never_written_over_by_another(tmp_path):
    with Runner(tmp_path, OptimizerConfig()) as runner:
        runner.metrics.write(1, {"loss": 1.0})
        runner.metrics.write(2, {"loss": 1.0})
    with pytest.raises(ConfigError, match="already holds a run; set resume=true"):
        Runner(tmp_path, OptimizerConfig()).__enter__()
    with Runner(tmp_path, OptimizerConfig(), resume=True) as runner:
        runner.rewind(1)
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_what_was_run_is_written_down(tmp_path):
    with Runner(tmp_path, OptimizerConfig(lr=3e-4)):
        pass
    assert OptimizerConfig(**yaml.safe_load((tmp_path / "config.yaml").read_text())) == OptimizerConfig(lr=3e-4)
    assert json.loads((tmp_path / "versions.json").read_text())["torch"].startswith("2.")


def test_records_that_were_removed_end_the_run_at_the_next_step(tmp_path):
    with Runner(tmp_path / "run", OptimizerConfig()) as runner:
        runner.metrics.write(1, {"loss": 1.0})
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(FileNotFoundError, match=r"removed during the run: .*run/metrics.jsonl"):
            runner.metrics.write(2, {"loss": 1.0})


@pytest.mark.parametrize("size", [0, 50])
def test_a_disk_too_full_for_the_configuration_is_named_with_the_file(tmp_path, size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    runner = Runner(tmp_path, OptimizerConfig())
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            runner.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert user_message(caught.value).startswith(str(tmp_path / ("config.yaml" if size else ".lock")))


def test_a_run_returns_to_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Runner("run", OptimizerConfig()) as runner:
        (tmp_path / "other").mkdir()
        os.chdir("other")
        (tmp_path / "other").rmdir()
        runner.return_to_folder()
        assert os.getcwd() == str(tmp_path)
    assert "changed during the run to one that was removed; returning to" in capsys.readouterr().out.replace("\n", " ")


DISPLAY = """
import os, sys
from archon.training.runner import Runner
from archon.schema.config import OptimizerConfig
with Runner({run_dir!r}, OptimizerConfig()) as runner:
    runner.log("seen")
    {lose}
    with runner.progress("sft", 2, columns=("loss",)) as progress:
        for step in (1, 2):
            runner.log("not seen")
            progress.update(step, {{"loss": 1.0}})
            runner.metrics.write(step, {{"loss": 1.0}})
print("not seen either")
"""


@pytest.mark.parametrize(
    "lose",
    [
        "os.close(1)",
        "sys.stdout.close()",
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
        "r, w = os.pipe(); os.close(r); os.dup2(w, 1)",
    ],
    ids=["descriptor", "stream", "disk", "pipe"],
)
def test_a_run_goes_on_without_its_standard_output(tmp_path, lose):
    done = run_code(DISPLAY.format(run_dir=str(tmp_path / "run"), lose=lose))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "seen\n"
    [line] = done.stderr.splitlines()
    assert line.startswith("archon: standard output cannot be written (") and "the run goes on without it" in line
    assert [record["step"] for record in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2]


def show_steps(runner):
    with runner.progress("sft", total=3, columns=("loss", "tokens")) as progress:
        for step in (1, 2, 3):
            progress.update(step, {"loss": 1 / step, "tokens": 20000 * step, "hidden": 0})


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 3600)
    with Runner(tmp_path, OptimizerConfig(), console=Console(file=screen)) as runner:
        show_steps(runner)
    assert screen.getvalue().splitlines() == ["sft 1/3  loss 1  tokens 20,000", "sft 3/3  loss 0.3333  tokens 60,000"]


def test_progress_is_a_table_and_a_bar_on_a_terminal(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Runner(tmp_path, OptimizerConfig(), console=console) as runner:
        show_steps(runner)
    screen = console.file.getvalue()
    assert "60,000" in screen and "3/3" in screen and "hidden" not in screen
