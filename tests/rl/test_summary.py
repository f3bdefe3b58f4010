"""What a step writes down, against numbers worked by hand."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.generation.record import TokenRecord
from archon.generation.types import ModelResponse
from archon.rl.prompts import Prompt
from archon.rl.rollout import RolloutBatch
from archon.rl.summary import NO_FAILURES, batch_metrics, reward_gains, staleness, write_groups
from archon.rl.trajectories import trajectory_tensors
from archon.training.metrics import TrajectoryWriter, read_jsonl

NOTHING_LOST = {"dropped/reward_timeout", "dropped/reward_crashed", "dropped/reward_raised", "dropped/reward_invalid"}


def two_turns(text: dict[str, int]) -> TokenRecord:
    """7+7= is answered 1 by version 4 and, told 0+, 14 by versions 4 and 6."""
    record = TokenRecord()
    record.observe([text[c] for c in "7+7="])
    record.answer(ModelResponse(record.input_ids[:], [text["1"]], [-0.5], [4], "stop"))
    record.observe([text["0"], text["+"]])
    record.answer(ModelResponse(record.input_ids[:], [text["1"], text["4"]], [-1.0, -2.0], [4, 6], "length"))
    return record


@pytest.fixture
def batch(tokenizer: Any) -> RolloutBatch:
    """One group: an answer of two turns, and one of a single token."""
    text = {c: tokenizer.convert_tokens_to_ids(c) for c in "0147+="}
    short = TokenRecord()
    short.observe([text[c] for c in "7+7="])
    short.answer(ModelResponse(short.input_ids[:], [text["4"]], [-0.25], [6], "stop"))
    trajectories = trajectory_tensors([two_turns(text), short], [1.0, 0.0])
    counts = Counter({"prompts": 5, "episodes": 5, "rejected": 1, "failed/KeyError": 1, "zero_variance_groups": 2})
    return RolloutBatch(
        trajectories | {"group_ids": torch.zeros(2, dtype=torch.int64)}, [Prompt(9, {"answer": "14"})], counts
    )


def test_staleness_worked_by_hand() -> None:
    # Trained: versions 4, 4, 6 and 6; the trainer is at 7, so they are 3, 3, 1 and 1 behind. Version 1 is not trained.
    versions = torch.tensor([[-1, 4, -1, 4, 6], [-1, 6, 1, -1, -1]])
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 1, 0, 0, 0]])
    assert staleness(versions, mask, 7) == {"staleness_mean": 2.0, "staleness_max": 3.0}
    # One more trained token, of a version that nobody knows.
    mask[1, 3] = 1
    assert staleness(versions, mask, 7) == {"staleness_mean": 2.0, "staleness_max": 3.0}
    assert staleness(torch.full((1, 2), -1), torch.ones(1, 2), 7) == {}


def test_batch_metrics_worked_by_hand(batch: RolloutBatch) -> None:
    metrics = batch_metrics(batch, version=7)
    assert (metrics["reward"], metrics["reward_std"], metrics["length"]) == (0.5, 0.5, 2.0)
    batch.reward = 0.75  # with the dropped groups
    metrics = batch_metrics(batch, version=7)
    assert (metrics["reward"], metrics["trained_reward"]) == (0.75, 0.5)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.0, 3.0)
    assert metrics["truncated"] == 0.5
    assert metrics["group_size"] == 2.0
    # Of 5 episodes one was rejected and one failed; 2 of the other 3 groups were rewarded alike.
    assert metrics["zero_variance_fraction"] == pytest.approx(2 / 3)


def test_a_step_of_which_nothing_is_left_still_says_what_was_lost() -> None:
    metrics = batch_metrics(RolloutBatch(counts=Counter({"episodes": 4, "zero_variance_groups": 4})), version=0)
    assert metrics["zero_variance_fraction"] == 1.0
    assert "reward" not in metrics and "staleness_mean" not in metrics
    assert "zero_variance_fraction" not in batch_metrics(
        RolloutBatch(counts=Counter({"episodes": 2, "rejected": 2})), 0
    )


def test_reward_failures_are_a_series_of_each_kind(batch: RolloutBatch) -> None:
    assert {name.removeprefix("rollout/") for name in NO_FAILURES} == NOTHING_LOST
    batch.counts["dropped/reward_timeout"] = 3
    metrics = batch_metrics(batch, version=7)
    assert {name: metrics[f"rollout/{name}"] for name in NOTHING_LOST} == {
        name: 3.0 if name == "dropped/reward_timeout" else 0.0 for name in NOTHING_LOST
    }


def test_the_dump_has_every_token_behind_the_prompt(batch: RolloutBatch, tokenizer: Any, tmp_path: Path) -> None:
    advantages = torch.ones(2, 9)
    with closing(TrajectoryWriter(tmp_path / "trajectories.jsonl")) as writer:
        write_groups(writer, batch, advantages, 1, step=3, tokenizer=tokenizer)
    long, _ = read_jsonl(tmp_path / "trajectories.jsonl")
    assert (long["step"], long["group"], long["prompt"], long["answer"]) == (3, 9, "7+7=", "14")
    assert (long["completion"], long["length"], long["stop_reason"]) == ("114", 3, "length")
    assert long["tokens"] == ["1", "0", "+", "1", "4"]
    assert long["logprobs"] == [-0.5, None, None, -1.0, -2.0]
    assert long["turn_ids"] == [0, -1, -1, 1, 1]
    assert long["versions"] == [4, -1, -1, 4, 6]
    assert "version" not in long


def test_the_dump_of_a_plain_answer_is_what_it_was(batch: RolloutBatch, tokenizer: Any, tmp_path: Path) -> None:
    with closing(TrajectoryWriter(tmp_path / "trajectories.jsonl")) as writer:
        write_groups(writer, batch, torch.ones(2, 9), 1, step=3, tokenizer=tokenizer)
    _, short = read_jsonl(tmp_path / "trajectories.jsonl")
    assert (short["tokens"], short["logprobs"], short["version"]) == (["4"], [-0.25], 6)
    assert (short["completion"], short["length"], short["stop_reason"]) == ("4", 1, "stop")
    assert "turn_ids" not in short and "versions" not in short


def test_gains_are_of_what_was_measured_both_before_and_after() -> None:
    """A resumed run may measure otherwise than the one it continues from."""
    before, after = {"eval/reward": 0.25, "eval/greedy_reward": 0.5}, {"eval/reward": 0.75}
    assert reward_gains([before, {"loss": 1.0}, after]) == ["held-out reward, sampled: 0.250 before, 0.750 after"]
    assert len(reward_gains([before, before])) == 2
