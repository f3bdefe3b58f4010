"""`kill -9` and resume: the run continues bitwise, and trains each prompt exactly once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.checkpoint.native import load_latest
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner
from tests.conftest import Kills
from tests.rl.written import assert_bitwise_equal_runs

MakeConfig = Callable[..., RLConfig]
ROOT = Path(__file__).resolve().parents[2]


def start(config: RLConfig, kill_at: str | None = None) -> subprocess.Popen[bytes]:
    """`archon rl` in a process of its own; `kill_at` makes it kill itself inside a save."""
    file = Path(config.run_dir).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    environment = os.environ | ({"ARCHON_KILL_AT": kill_at} if kill_at else {})
    command = [sys.executable, "-m", "archon", "rl", "--config", str(file)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_kill_9_inside_a_save_and_resume_is_bitwise_and_trains_each_prompt_exactly_once(
    rl_config: MakeConfig, tmp_path: Path, kills: Kills
) -> None:
    """Killed in the third save: steps 3 to 5 are repeated from step 2's checkpoint, and their records replaced."""
    common: dict[str, Any] = {"total_steps": 6, "checkpoint": {"every": 1}}
    whole = rl_config(run_dir=str(tmp_path / "whole"), **common)
    RLTrainer(whole).train()
    config = rl_config(run_dir=str(tmp_path / "killed"), resume=True, **common)
    process = start(config, kill_at="save.tensors_written:3")
    assert process.wait(timeout=120) == -signal.SIGKILL
    found = load_latest(tmp_path / "killed" / "checkpoints")
    assert found is not None
    assert found[0] == 2
    kills.add("save.tensors_written", save=3, latest_step=2)
    RLTrainer(config).train()
    assert_bitwise_equal_runs(config, whole)


def test_a_run_stopped_before_its_first_step_evaluates_anew_and_records_it_once(rl_config: MakeConfig) -> None:
    config = rl_config(
        total_steps=1,
        resume=True,
        eval_data={"path": "arithmetic", "split": "test"},
        evaluation={"max_prompts": 4, "greedy": False},
    )
    with Runner(config.run_dir, config, resume=True) as runner:
        runner.metrics.write(0, {"eval/reward": 0.0})
        stopped = RLTrainer(config, runner)
        with stopped.opened():
            stopped.save()

    RLTrainer(config).train()

    assert [row["step"] for row in read_jsonl(Path(config.run_dir) / "metrics.jsonl")] == [0, 1]


def test_a_run_killed_before_its_first_checkpoint_records_no_step_twice(rl_config: MakeConfig) -> None:
    config = rl_config(total_steps=2, resume=True)
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True)
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        (run_dir / name).write_text('{"step": 0}\n{"step": 1, "group": 0}\n')

    RLTrainer(config).train()

    steps = [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert steps == sorted(set(steps))
    assert all("rewards" in row or len(row) > 2 for row in read_jsonl(run_dir / "trajectories.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twenty starts of a process, where the record is made
def test_kill_9_at_random_moments_and_resume_is_bitwise(rl_config: MakeConfig, tmp_path: Path, kills: Kills) -> None:
    common: dict[str, Any] = {"total_steps": 15 * kills.wanted, "checkpoint": {"every": 2, "keep": 1}}
    whole = rl_config(run_dir=str(tmp_path / "whole"), **common)
    RLTrainer(whole).train()
    config = rl_config(run_dir=str(tmp_path / "killed"), resume=True, **common)
    metrics, chance = tmp_path / "killed" / "metrics.jsonl", random.Random(7)
    for _ in range(kills.wanted):
        process = start(config)
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        while not metrics.exists() or metrics.stat().st_mtime_ns == before or not metrics.stat().st_size:
            assert process.poll() is None
            time.sleep(0.005)
        seconds = chance.uniform(0, 0.5)
        time.sleep(seconds)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        kills.add(f"{seconds:.3f} s after a step", recorded_step=read_jsonl(metrics)[-1]["step"])
    RLTrainer(config).train()
    assert_bitwise_equal_runs(config, whole)
