"""Hostile values for every argument and configuration leaf: used or refused in a few lines; inputs stay whole."""

from __future__ import annotations

import functools
import os
import random
import shutil
import socket
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import typer

from archon.engine.engine import ArchonEngine
from archon.schema.config import EngineConfig
from tests.cli.hostile import SCHEMAS, Result, argument_cases, changes, leaf_cases, listing, run_case

COMMANDS = ["models", "inspect", "check-model", "new-model", "plan", "convert", "export", "bootstrap", "sft"]
COMMANDS += ["preference", "rl", "generate", "eval", "serve", "serve-training", "bench", "report", "doctor"]
ARGUMENT_PARTS, LEAF_PARTS = 31, 61
"""Parts of some 250 and 550 cases. Prime, so that each part has all values, which follow each other by argument."""


@pytest.fixture
def inputs(checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch) -> Iterator[dict[str, Any]]:
    """What commands read: a checkpoint, a LoRA, rows, a run, files of odd kinds, and a port in use."""
    adapted = ArchonEngine(
        EngineConfig.parse({"path": str(checkpoint), "device": "cpu", "optimizer": None, "lora": {"rank": 2}})
    )
    adapted.initialize()
    adapted.save(tmp_path / "adapter", format="peft")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setenv("HOME", str(tmp_path / "work"))
    monkeypatch.delenv("NOPE", raising=False)
    run_dir = tmp_path / "finished"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss": 1.0}\n')
    monkeypatch.setattr("archon.tools.report.draw_curves", lambda run, folder: [])
    # typer builds the objects of all commands again for each run, which takes longer than most cases.
    monkeypatch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield {
            "checkpoint": checkpoint,
            "dataset": dataset,
            "adapter": tmp_path / "adapter",
            "run_dir": run_dir,
            "folder": tmp_path,
            "port": taken.getsockname()[1],
        }


def faulty(cases: Iterable[list[str]], folder: Path) -> list[Result]:
    """Return the results of cases with a fault, each run in an empty folder `work` next to the inputs."""
    work, found = folder / "work", []
    for arguments in cases:
        work.mkdir()
        before = listing(folder)
        result = run_case(arguments, work)
        shutil.rmtree(work)
        work.mkdir()
        if changed := changes(before, listing(folder)):
            result.faults.append(f"changed {', '.join(changed)}")
        work.rmdir()
        if result.faults:
            found.append(result)
    return found


def describe(results: list[Result]) -> str:
    def short(text: str) -> str:
        return text if len(text) <= 300 else f"{text[:200]}… {len(text)} characters"

    return "\n".join(
        f"archon {' '.join(short(repr(argument)) for argument in result.arguments)}\n    {'; '.join(result.faults)}\n"
        f"    {short(result.err)!r}"
        for result in results
    )


def test_a_sample_of_hostile_values(inputs: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(0)
    arguments = [case for command in COMMANDS for case in argument_cases(command, inputs)]
    settings = [case for command in SCHEMAS for case in leaf_cases(command, inputs)]
    found = faulty(draw.sample(arguments, 40) + draw.sample(settings, 20), tmp_path)
    assert not found, describe(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(ARGUMENT_PARTS))
def test_every_argument_with_every_hostile_value(inputs: dict[str, Any], tmp_path: Path, part: int) -> None:
    cases = chain.from_iterable(argument_cases(command, inputs) for command in COMMANDS)
    found = faulty(islice(cases, part, None, ARGUMENT_PARTS), tmp_path)
    assert not found, describe(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(LEAF_PARTS))
def test_every_leaf_with_every_hostile_value(inputs: dict[str, Any], tmp_path: Path, part: int) -> None:
    cases = chain.from_iterable(leaf_cases(command, inputs) for command in SCHEMAS)
    found = faulty(islice(cases, part, None, LEAF_PARTS), tmp_path)
    assert not found, describe(found)
