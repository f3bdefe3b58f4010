"""The command where its surroundings are unusual: a removed folder, the locale, torchrun's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import run_code


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process of its own with further environment variables."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_folder_that_was_removed(tmp_path: Path):
    folder = tmp_path / "gone"
    folder.mkdir()
    move = f"import os; os.chdir({str(folder)!r}); os.rmdir({str(folder)!r})"
    done = python(f"{move}; from archon.cli import main; main(['--version'])")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("archon ")


def test_data_sheets_are_read_in_any_locale():
    code = (
        "from archon.tools.planner.hardware import known_hardware, read_hardware; "
        "[*map(read_hardware, known_hardware())]"
    )
    done = python(code, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"WORLD_SIZE": "two"}, "the environment has WORLD_SIZE='two', expected a number: leave it to torchrun"),
        ({"RANK": "x"}, "process x of 2 cannot join the others within 1 s (invalid literal for int()"),
        ({}, "process 0 of 2 cannot join the others within 1 s (Timed out after "),
    ],
    ids=["size", "rank", "alone"],
)
def test_processes_that_cannot_join(variables: dict[str, str], reason: str):
    code = (
        "from archon.cli.app import exit_on_error\n"
        "from archon.parallel.process_group import join_process_group\n"
        "with exit_on_error():\n"
        "    join_process_group(2, 'cpu', timeout_s=1.0)\n"
    )
    surroundings = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_code(code, environment=os.environ | surroundings | variables)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"archon: {reason}" in done.stderr


@pytest.mark.slow
def test_a_command_that_compiles_nothing_leaves_no_folder_for_compiled_code(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`import torch._dynamo` creates it, and names it in the environment: here too."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    arguments = ["generate", str(checkpoint), "--prompt", "1+1=", "max_new_tokens=1", "device=cpu"]
    (temporary := tmp_path / "temporary").mkdir()
    done = python(f"from archon.cli import main; main({arguments})", TMPDIR=str(temporary))
    assert done.returncode == 0 and "1 tokens" in done.stderr, done.stderr
    assert [*temporary.iterdir()] == []
