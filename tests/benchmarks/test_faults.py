"""What the benchmark of faults counts: by the final weights, each prompt once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.native import save_state
from benchmarks.faults.outcome import is_good, outcome

Run = dict[str, Any]
STEPS, PROMPTS = 3, 2


def a_run() -> Run:
    """Three steps of two prompts, of which the last checkpoint has all."""
    metrics = [
        {"step": step, "first_logprob_diff": 2e-7, "servers/lost": 1.0, "servers/retried": 2.0, "rollout/dump_lost": 0}
        for step in range(1, STEPS + 1)
    ]
    rows = [
        {"step": step, "group": (step - 1) * PROMPTS + place, "reward": 0.5}
        for step in range(1, STEPS + 1)
        for place in range(PROMPTS)
        for _ in range(2)
    ]
    return {"metrics": metrics, "rows": rows, "step": STEPS, "taken": STEPS * PROMPTS}


def counted(run: Run, folder: Path) -> dict[str, Any]:
    data = {"epoch": run["taken"] // 4, "rows": 4, "cursor": run["taken"] % 4, "again": []}
    save_state(folder / "checkpoints", run["step"], {"prompts": data})
    for name, lines in (("metrics", run["metrics"]), ("trajectories", run["rows"])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return outcome(folder)


def test_a_run_that_trained_each_prompt_once_passes(tmp_path: Path) -> None:
    found = counted(a_run(), tmp_path)
    assert is_good(found) and found["prompts"] == found["prompts_taken"] == 6 and found["steps"] == 3
    assert (found["servers_lost"], found["requests_retried"]) == (3, 6)


def again(run: Run) -> None:
    run["rows"].append({"step": 3, "group": 0, "reward": 0.5})


def never(run: Run) -> None:
    run["rows"] = [row for row in run["rows"] if row["group"] != 3]


def other_weights(run: Run) -> None:
    run["metrics"][1]["first_logprob_diff"] = 1e-4


def one_step_twice(run: Run) -> None:
    run["metrics"].append(run["metrics"][-1])


def not_in_the_weights(run: Run) -> None:
    run["step"], run["taken"] = 2, 4


def not_written(run: Run) -> None:
    run["metrics"][0]["rollout/dump_lost"] = 4


@pytest.mark.parametrize("change", [again, never, other_weights, one_step_twice, not_in_the_weights, not_written])
def test_what_must_not_happen_is_seen(change: Callable[[Run], None], tmp_path: Path) -> None:
    change(run := a_run())
    assert not is_good(counted(run, tmp_path))


def test_a_prompt_whose_loss_is_counted_may_be_missing(tmp_path: Path) -> None:
    never(run := a_run())
    run["metrics"][1]["rollout/failed/RewardError"] = 1
    assert is_good(counted(run, tmp_path))
