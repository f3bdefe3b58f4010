"""What `benchmarks.busy` compares before it says how long the sides took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.busy import ALONE, compare, count_passed, fine_tuned, learned
from benchmarks.harness import DisagreementError


def test_a_runs_steps_episodes_and_last_reward_are_compared(tmp_path: Path) -> None:
    steps = [{"step": 0, "eval/reward": 0.1}]
    steps += [{"step": step, "rollout/episodes": 8.0, "reward": 0.5} for step in range(1, 4)]
    steps[-1]["eval/reward"] = 0.6
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    done = learned(tmp_path)
    assert done == {"steps": 3.0, "rollout/episodes": 24.0, "held-out reward": 0.6}
    assert len(compare(ALONE, {ALONE: done, "other": done | {"held-out reward": 0.55}})) == 3
    for changed in ({"steps": 2.0}, {"rollout/episodes": 23.0}, {"held-out reward": 0.1}):
        with pytest.raises(DisagreementError):
            compare(ALONE, {ALONE: done, "other": done | changed})


def test_the_last_count_of_passed_tests_is_read() -> None:
    assert count_passed("2 passed earlier\n== 1 failed, 7626 passed, 8 skipped in 1122.48s ==") == {"tests": 7626.0}


def test_the_last_step_of_fine_tuning_is_read() -> None:
    shown = "sft 230/240  loss 0.37\nsft 240/240  loss 0.36\nrl 1/30  reward 0.4\n"
    assert fine_tuned(shown) == 240
