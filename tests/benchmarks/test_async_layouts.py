"""What the benchmark of runs that run ahead takes for success, and how it goes on where it was interrupted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import async_layouts
from benchmarks.async_layouts import CASES, CONTROL, PROMPTS_PER_STEP, SYNCHRONOUS, Case, is_as_expected, outcome, rows
from benchmarks.harness import ROOT, BenchmarkError
from benchmarks.runs import RECORDS

GOOD = {"code": 0, "each_once": True, "staleness_max": 2.0, "reward_before": 0.4, "reward_after": 0.95}


def test_every_layout_has_every_staleness() -> None:
    cases = [Case.parse(case) for case in CASES]
    assert {(case.layout, case.staleness) for case in cases} == {
        (layout, staleness) for layout in ("d2", "t2", "p2", "d2t2") for staleness in (0, 2, 8)
    }
    assert all(case.servers and not case.control for case in cases)


def test_the_record_has_every_run_and_each_did_what_is_expected() -> None:
    lines = [json.loads(line) for line in (RECORDS / "async_layouts.jsonl").read_text().splitlines()]
    cases = [SYNCHRONOUS, CONTROL, *map(Case.parse, CASES)]
    assert [line["case"] for line in lines] == [case.name for case in cases]
    synchronous = lines[0]["reward_after"]
    assert synchronous > lines[0]["reward_before"] + 0.5, "little was learned, so little could go wrong"
    for case, line in zip(cases, lines, strict=True):
        assert is_as_expected(case, line, synchronous, async_layouts.WITHIN), line


def test_the_guide_says_what_the_record_says() -> None:
    synchronous, control, *runs = map(json.loads, (RECORDS / "async_layouts.jsonl").read_text().splitlines())
    before, after = (f"{synchronous[f'reward_{when}']:.3f}" for when in ("before", "after"))
    lowest, highest = (f"{of(run['reward_after'] for run in runs):.3f}" for of in (min, max))
    said = (
        f"from {before} to {after}, these runs to between {lowest} and {highest}, and shuffled rewards to "
        f"{control['reward_after']:.3f}"
    )
    assert said in " ".join((ROOT / "docs" / "tasks" / "asynchronous.md").read_text().split())


def test_no_two_numbers_are_trained_on_and_held_out() -> None:
    train, test = (
        {frozenset(row["prompt"].rstrip("=").split("?")) for row in rows(split)} for split in ("train", "test")
    )
    assert len(test) > 200 and not train & test
    assert all(row["answer"] == max(row["prompt"][0], row["prompt"][3]) for row in rows("test"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"reward_after": 0.931}, True),
        ({"reward_after": 0.929}, False),
        ({"reward_after": 0.99}, True),
        ({"staleness_max": 3.0}, False),
        ({"each_once": False}, False),
        ({"code": 1}, False),
    ],
)
def test_a_run_ends_within_the_bound_of_the_synchronous_one(changes: dict[str, Any], expected: bool) -> None:
    assert is_as_expected(Case("d2", 2), GOOD | changes, 0.95, 0.02) is expected


@pytest.mark.parametrize(("after", "expected"), [(0.4, True), (0.2, True), (0.51, False), (0.95, False)])
def test_a_control_may_not_learn(after: float, expected: bool) -> None:
    assert is_as_expected(CONTROL, GOOD | {"reward_after": after}, 0.95, 0.02) is expected


@pytest.mark.parametrize(("last_group", "each_once"), [(2 * PROMPTS_PER_STEP - 1, True), (0, False)])
def test_a_prompt_that_two_steps_trained_on_is_found(tmp_path: Path, last_group: int, each_once: bool) -> None:
    groups = [*range(2 * PROMPTS_PER_STEP - 1), last_group]
    rows: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.4}]
    rows += [{"step": step, "groups": PROMPTS_PER_STEP, "rollout/episodes": PROMPTS_PER_STEP} for step in (1, 2)]
    rows[-1]["eval/reward"] = 0.9
    dumped = [{"step": 1 + place // PROMPTS_PER_STEP, "group": group} for place, group in enumerate(groups)]
    for name, lines in (("metrics", rows), ("trajectories", dumped)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = outcome(tmp_path)
    assert found["each_once"] is each_once
    assert (found["reward_before"], found["reward_after"], found["steps"]) == (0.4, 0.9, 2)


def test_a_command_that_was_interrupted_goes_on_and_runs_what_failed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs themselves are not run here."""
    record, start, ran = tmp_path / "record.jsonl", tmp_path / "start", list[str]()
    start.mkdir()
    (start / "model.safetensors").write_bytes(b"weights")
    ends: dict[str, int | None] = {"d2:0 servers": 1, "d2:2 servers": None}

    def train(case: Case, *_: Any) -> dict[str, Any]:
        ran.append(case.name)
        code = ends.get(case.name, 0)
        if code is None:
            raise KeyboardInterrupt
        after = 0.4 if case.control else 0.95
        found: dict[str, Any] = {"case": case.name, "code": code}
        return found if code else found | GOOD | {"staleness_max": 0.0, "reward_after": after}

    monkeypatch.setattr(async_layouts, "train", train)
    arguments = ["async_layouts", "d2:0", "d2:2", "--record", str(record), "--start", str(start)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(KeyboardInterrupt):
        async_layouts.main()
    assert ran == ["d1:0 in process", "d1:2 servers, control", "d2:0 servers", "d2:2 servers"]
    ran.clear()
    ends.clear()
    with pytest.raises(SystemExit) as ended:
        async_layouts.main()
    assert ended.value.code == 0 and ran == ["d2:0 servers", "d2:2 servers"]
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(lines) == 4 and all(line["as_expected"] for line in lines)
    (start / "model.safetensors").write_bytes(b"others")
    with pytest.raises(BenchmarkError, match="name another record"):
        async_layouts.main()
