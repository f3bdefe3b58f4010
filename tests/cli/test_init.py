"""`archon init` writes configurations that `--dry-run` accepts, from options or from answers on a terminal."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPES = Path(__file__).resolve().parents[2] / "rl" / "recipes"
ROWS = {
    "sft": {"prompt": "1+1=", "response": "2"},
    "preference": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "rl": {"prompt": "1+1=", "answer": "2"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Path:
    """A folder with a checkpoint and rows for each task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").symlink_to(checkpoint)
    for task, row in ROWS.items():
        (tmp_path / f"{task}.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    return tmp_path


@pytest.mark.parametrize("task", ROWS)
@pytest.mark.parametrize(("method", "gpus"), [("lora", 0), ("full", 2)])
def test_the_written_configuration_is_accepted(archon: Any, folder: Path, task: str, method: str, gpus: int) -> None:
    options = [
        "--task",
        task,
        "--model",
        "my model",
        "--data",
        f"{task}.jsonl",
        "--gpus",
        str(gpus),
        "--method",
        method,
    ]
    said = archon("init", *options).out.splitlines()
    check, start = map(shlex.split, said[1:])
    assert said[0] == "wrote run.yaml; next:" and start[:3] == [
        "archon",
        *(["launch", "--nproc-per-node"] if gpus else [task, "--config"]),
    ]
    values = yaml.safe_load((folder / "run.yaml").read_text())
    model = values["actor" if task == "rl" else "model"]
    assert model["path"] == "my model" and ("lora" in model) == (method == "lora")
    assert model["layout"] == ("d2" if gpus else "d1")
    outcome = archon(*check[1:])
    assert outcome.code == 0, outcome.err
    assert "64 rows" in outcome.out


def test_a_terminal_asks_what_is_missing_until_the_answer_is_one(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "archon", "init", "--model", "my model", "--output", "new/asked.yaml"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        os.write(ours, b"poetry\npreference\npreference.jsonl\nmany\n-3\n\n\n")
        said = process.communicate(timeout=60)[0]
    os.close(ours), os.close(theirs)
    assert process.returncode == 0, said
    assert "expected sft or preference or rl" in said and "expected at least 0" in said
    values = yaml.safe_load((folder / "new" / "asked.yaml").read_text())
    assert values["train_data"]["path"] == "preference.jsonl" and "loss" in values
    assert values["model"]["layout"] == "d1" and values["model"]["lora"]["rank"] == 16


def test_without_a_terminal_the_missing_option_is_named_and_no_file_is_replaced(archon: Any, folder: Path) -> None:
    outcome = archon("init", "--task", "sft", "--model", "my model")
    assert "--data is missing" in outcome.complaint
    assert not (folder / "run.yaml").exists()
    (folder / "run.yaml").write_text("mine: 1")
    outcome = archon("init", "--task", "sft")
    assert "run.yaml already exists" in outcome.complaint
    assert (folder / "run.yaml").read_text() == "mine: 1"


def test_recipes_are_copied_with_their_bootstrap_and_run(archon: Any, folder: Path) -> None:
    said = archon("init", "--recipe", "arithmetic_cpu", "--output", "my run/sums.yaml").out.splitlines()
    assert said == [
        "wrote my run/sums.yaml and my run/arithmetic_bootstrap.yaml; next:",
        "  archon rl --config 'my run/sums.yaml'",
    ]
    alone = "#   archon bootstrap --config 'my run/arithmetic_bootstrap.yaml' path=runs/start"
    assert alone in (folder / "my run" / "arithmetic_bootstrap.yaml").read_text().splitlines()
    outcome = archon(*shlex.split(said[1])[1:], "--dry-run")
    assert outcome.code == 0, outcome.err
    again = archon("init", "--recipe", "arithmetic_cpu", "--output", "my run/new.yaml")
    assert "my run/arithmetic_bootstrap.yaml already exists" in again.complaint
    assert not (folder / "my run" / "new.yaml").exists()


def test_recipes_are_listed_and_unknown_ones_refused(archon: Any, folder: Path) -> None:
    listed = [line.split()[0] for line in archon("init", "--recipe", "list").out.splitlines()]
    assert listed == sorted(file.stem for file in RECIPES.glob("*.yaml"))
    assert f"no recipe sums; expected one of {', '.join(listed)}" in archon("init", "--recipe", "sums").complaint
    copy = ("init", "--recipe", "arithmetic_cpu")
    assert "--gpus has no effect with --recipe" in archon(*copy, "--gpus", "0").complaint
    assert "--reward has no effect with --recipe" in archon(*copy, "--reward", "exact_match").complaint
    taken = archon(*copy, "--output", "arithmetic_bootstrap.yaml").complaint
    assert "arithmetic_bootstrap.yaml is the name of the recipe's bootstrap file" in taken
    assert not list(folder.glob("*.yaml"))
