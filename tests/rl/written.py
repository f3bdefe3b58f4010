"""What a run of the RL layer has written down, as tests compare it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archon.checkpoint.hf_io import load_model
from archon.rl.config import RLConfig
from archon.training.config import PreferenceConfig
from archon.training.metrics import read_jsonl

CLOCKED = ("seconds/", "samples_per_second", "time")


def records(config: RLConfig | PreferenceConfig) -> list[dict[str, Any]]:
    """The run's metrics without what a clock had a hand in."""
    rows = read_jsonl(Path(config.run_dir) / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(CLOCKED)} for row in rows]


def prompts_trained(config: RLConfig) -> list[tuple[int, int]]:
    """(step, prompt's ordinal) of every group, from the trajectory dump."""
    rows = read_jsonl(Path(config.run_dir) / "trajectories.jsonl")
    return sorted({(row["step"], row["group"]) for row in rows})


def assert_each_prompt_trained_once(config: RLConfig, ahead: int = 0) -> None:
    """In the order of the stream, except for at most that many that are still on their way when the run ends."""
    groups = [group for _, group in prompts_trained(config)]
    n = config.total_steps * config.rollout.prompts_per_step
    assert len(groups) == len(set(groups)) == n
    assert set(groups) <= set(range(n + ahead))


def assert_bitwise_equal_runs(config: RLConfig, whole: RLConfig) -> None:
    """Weights, metrics and the prompts of each step, which are those of the stream in their order."""
    assert_bitwise_equal_results(config, whole)
    size = config.rollout.prompts_per_step
    steps = range(1, config.total_steps + 1)
    assert prompts_trained(config) == [(step, size * (step - 1) + i) for step in steps for i in range(size)]


def assert_bitwise_equal_results(config: RLConfig | PreferenceConfig, whole: RLConfig | PreferenceConfig) -> None:
    """Weights and metrics."""
    one, other = (load_model(Path(run.run_dir) / "export") for run in (config, whole))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.equal(b)
    assert records(config) == records(whole)
