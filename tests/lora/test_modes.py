"""Other processes read the checkpoints of a run with adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from archon.rl import RLTrainer
from archon.rl.modes import make_trainer
from archon.training.metrics import read_jsonl
from tests.lora.tiny import rl_run


@pytest.mark.slow
def test_checkpoints_of_adapters_are_evaluated_as_the_run_itself_did(checkpoint: Path, tmp_path: Path) -> None:
    held_out = {"eval_data": {"path": "arithmetic", "split": "test"}, "checkpoint": {"every": 2, "keep": 9}}
    held_out["evaluation"] = {"every": 2, "max_prompts": 20, "greedy": False}
    RLTrainer(rl_run(checkpoint, tmp_path / "run", **held_out)).train()
    measured = {row["step"]: row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")}
    read = {"weights_from": str(tmp_path / "run")}
    make_trainer(rl_run(checkpoint, tmp_path / "bench", mode="bench", experiences=read, **held_out)).train()
    rows = read_jsonl(tmp_path / "bench" / "metrics.jsonl")
    assert [row["checkpoint"] for row in rows] == [2, 4]
    for row in rows:
        assert row["eval/reward"] == measured[row["checkpoint"]]["eval/reward"]
        assert row["eval/length"] == measured[row["checkpoint"]]["eval/length"]
    assert measured[2]["eval/reward"] != measured[0]["eval/reward"]
