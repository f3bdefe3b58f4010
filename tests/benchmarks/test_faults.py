"""What the benchmark of faults counts: by the final weights, each prompt once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.native import save_state
from archon.remote.http import KEY
from archon.training.metrics import read_jsonl
from benchmarks.faults import __main__ as command
from benchmarks.faults.__main__ import faults
from benchmarks.faults.chaos import ALL_KINDS, SECONDS, STOPPED_SECONDS, TIMES_SLOWER, Pace
from benchmarks.faults.outcome import is_good, outcome
from benchmarks.faults.slowdown import Slowdown
from benchmarks.faults.tokens import token_differences

Run = dict[str, Any]
STEPS, PROMPTS = 3, 2


def a_run() -> Run:
    """Three steps of two prompts, of which the last checkpoint has all."""
    metrics = [
        {
            "step": step,
            "first_logprob_diff": 2e-7,
            "staleness_max": 0.0,
            "samples": 4.0,
            "length": 2.5,
            "servers/lost": 1.0,
            "servers/retried": 2.0,
            "rollout/dump_lost": 0,
        }
        for step in range(1, STEPS + 1)
    ]
    rows = [
        {"step": step, "group": (step - 1) * PROMPTS + place, "reward": 0.5}
        for step in range(1, STEPS + 1)
        for place in range(PROMPTS)
        for _ in range(2)
    ]
    scored = {"tokens": STEPS * 10, "largest_token_difference": 1e-6, "staleness": 0, "failed": ""}
    return {"metrics": metrics, "rows": rows, "step": STEPS, "taken": STEPS * PROMPTS, "again": [], "scored": scored}


def counted(run: Run, folder: Path) -> dict[str, Any]:
    data = {"epoch": run["taken"] // 4, "rows": 4, "cursor": run["taken"] % 4, "again": run["again"]}
    save_state(folder / "checkpoints", run["step"], {"prompts": data})
    for name, lines in (("metrics", run["metrics"]), ("trajectories", run["rows"])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return outcome(folder) | run["scored"]


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


def not_scored(run: Run) -> None:
    run["scored"]["tokens"] -= 1


def a_token_of_other_weights(run: Run) -> None:
    run["scored"]["largest_token_difference"] = 1e-2


def too_old(run: Run) -> None:
    run["metrics"][2]["staleness_max"] = 1.0


def hung(run: Run) -> None:
    run["scored"]["failed"] = "not whole again within 70 s"


CHANGES = [again, never, other_weights, one_step_twice, not_in_the_weights, not_written]
CHANGES += [not_scored, a_token_of_other_weights, too_old, hung]


@pytest.mark.parametrize("change", CHANGES)
def test_what_must_not_happen_is_seen(change: Callable[[Run], None], tmp_path: Path) -> None:
    change(run := a_run())
    assert not is_good(counted(run, tmp_path))


def test_a_prompt_whose_loss_is_counted_may_be_missing(tmp_path: Path) -> None:
    never(run := a_run())
    run["metrics"][1]["rollout/failed/RewardError"] = 1
    assert is_good(counted(run, tmp_path))


def test_prompts_that_wait_at_the_end_are_not_missing(tmp_path: Path) -> None:
    run = a_run()
    run["taken"], run["again"] = run["taken"] + 3, [6, 7, 8]
    assert is_good(counted(run, tmp_path))
    run["again"] = [6, 8]
    assert counted(run, tmp_path / "other")["prompts_missing"] == 1


def test_an_event_may_take_its_own_time_two_time_outs_and_what_it_costs() -> None:
    pace = Pace(run=10.0, step=1.0, slowdown=2.0)
    steps = TIMES_SLOWER * 5
    assert pace.limit("drop", 2.0) == pace.limit("drop", 1.0) == 2 * SECONDS + steps
    assert pace.limit("drop", 6.0) == 2 * SECONDS + 3 * steps, "the machine is three times slower than it was"
    assert pace.limit("stop", 2.0) == STOPPED_SECONDS + 2 * SECONDS + steps
    assert pace.limit("kill", 2.0, served=7.0) == 2 * SECONDS + steps + 7.0
    assert pace.limit("rank", 2.0) == pace.limit("disk", 2.0) == 2 * SECONDS + steps + TIMES_SLOWER * 20.0
    assert all(pace.limit(kind, 2.0) < 150 for kind in ALL_KINDS)


@pytest.mark.slow
def test_a_busy_machine_is_seen_to_be_slow() -> None:
    started, spin = time.monotonic(), [sys.executable, "-c", "while True: pass"]
    with Slowdown() as slowdown:
        time.sleep(2)
        quiet, busy = slowdown.since(started), time.monotonic()
        others = [subprocess.Popen(spin) for _ in range(4 * (os.cpu_count() or 1))]
        try:
            time.sleep(4)
        finally:
            for other in others:
                other.kill()
                other.wait()
        assert 1 <= quiet < slowdown.since(busy)
        assert slowdown.since(time.monotonic()) == 1.0, "nothing was measured yet"


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_is_harmed_trains_each_prompt_once_on_tokens_of_the_weights_they_name(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "faults")
    kinds = ("kill", "garbage") if staleness else ("drop", "version", "rank")
    *events, found = faults(tmp_path, len(kinds), staleness, kinds=kinds)
    assert [event["kind"] for event in events] == [*kinds] and all(event["seconds"] for event in events)
    assert is_good(found), found
    assert found["prompts"] == found["prompts_taken"] and found["tokens"] > 100 * len(events)
    assert 1000 * found["largest_token_difference"] < found["resolution"], "a push too little would have been seen"
    assert (found["starts"] > 1) == ("rank" in kinds)
    rows = read_jsonl(tmp_path / "run" / "trajectories.jsonl")
    rows[-1]["logprobs"][-1] += 1e-3
    (tmp_path / "run" / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = found | token_differences(tmp_path / "run", tmp_path / "blank")
    assert again["tokens"] == found["tokens"] and not is_good(again)


def test_a_record_keeps_what_was_seen_and_goes_on_with_the_runs_that_have_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    good = counted(a_run(), tmp_path / "good")

    def interrupted(folder: Path, events: int, staleness: int, seed: int) -> Iterator[dict[str, Any]]:
        made.append(staleness)
        yield {"event": 0, "kind": "drop"}
        if made == [0, 2]:
            raise KeyboardInterrupt
        yield good | {"staleness": staleness}

    monkeypatch.setattr(command, "faults", interrupted)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)  # this process keeps its own handlers
    record = tmp_path / "faults.jsonl"
    monkeypatch.setattr(sys, "argv", ["faults", "--record", str(record)])
    with pytest.raises(KeyboardInterrupt):
        command.main()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    seen = [("synchronous", None), ("synchronous", True), ("ahead", None)]
    assert [(line["run"], line.get("passed")) for line in lines] == seen
    with pytest.raises(SystemExit) as ended:
        command.main()
    again = [json.loads(line) for line in record.read_text().splitlines()]
    assert made == [0, 2, 2] and again[:2] == lines[:2] and again[3]["passed"] and not ended.value.code
