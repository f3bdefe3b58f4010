"""What goes wrong around training: nothing trained is lost, nothing hangs, and the counts are shown.

Rewards that misbehave are in `tests/rewards`, episodes that fail in `test_rollout`, signals in `test_interrupted`.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from archon.generation.types import InferenceEngine
from archon.rl import MultiTurnWorkflow, RLTrainer, RLVRWorkflow
from archon.rl.config import RLConfig
from archon.rl.episode_context import workflow_context
from archon.rl.rollout import WorkflowError
from archon.schema.errors import CheckpointError, RewardError
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner
from tests.checkpoint.killing import assert_checkpoints_whole
from tests.rl.written import records

MakeConfig = Callable[..., RLConfig]
ROLLOUT = {"prompts_per_step": 6, "n_gold_checks": 0, "dump_groups": 6, "workers": {"rewards": 1}}


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes meanwhile: a write is answered as by a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_of_trajectories_costs_no_training_and_is_counted_and_said_once(
    rl_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rl_config()
    path = Path(config.run_dir) / "trajectories.jsonl"
    with Runner(config.run_dir, config) as runner:
        trainer = RLTrainer(config, runner)
        with trainer.opened():
            assert trainer.train_step()["rollout/dump_lost"] == 0
            whole = path.read_bytes()
            before = {name: tensor.clone() for name, tensor in trainer.engine.weights()}
            with files_limited_to(len(whole) + 100):
                lost = [trainer.train_step()["rollout/dump_lost"] for _ in range(2)]
            assert lost == [24, 24]
            assert any(not tensor.equal(before[name]) for name, tensor in trainer.engine.weights())
            assert trainer.engine.version == 3
            assert path.read_bytes() == whole, "nothing stays of a line that did not go in"
            assert trainer.train_step()["rollout/dump_lost"] == 0
            assert len(read_jsonl(path)) == 2 * 24
    assert capsys.readouterr().out.count("unwritten samples are only counted") == 1


def test_a_disk_too_full_for_a_checkpoint_leaves_the_last_one_whole_and_ends_the_run(rl_config: MakeConfig) -> None:
    """A run that cannot be saved would lose what it trains."""
    config = rl_config(checkpoint={"every": 1})
    checkpoints = Path(config.run_dir) / "checkpoints"
    with Runner(config.run_dir, config) as runner:
        trainer = RLTrainer(config, runner)
        train_step = trainer.train_step

        def with_less_room() -> dict[str, float]:
            if trainer.step == 2:
                trainer.engine.wait_for_saves()
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            return train_step()

        trainer.train_step = with_less_room  # type: ignore[method-assign]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            with pytest.raises(CheckpointError, match=r"cannot write .* File too large"):
                trainer.train()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert assert_checkpoints_whole(checkpoints) == 2
    resumed = RLTrainer(config.model_copy(update={"resume": True}))
    resumed.train()
    assert [row["step"] for row in records(config)] == [1, 2, 3, 4]


def test_a_workflow_that_changes_the_folder_does_not_move_the_checkpoints(
    rl_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = rl_config(run_dir="relative", total_steps=1)
    trainer = RLTrainer(config)
    train_step = trainer.train_step

    def change_folder() -> dict[str, float]:
        os.chdir("/")
        return train_step()

    trainer.train_step = change_folder  # type: ignore[method-assign]
    trainer.train()
    assert assert_checkpoints_whole(tmp_path / "relative/checkpoints") == 1


def test_groups_that_are_all_dropped_are_dumped_and_marked(rl_config: MakeConfig) -> None:
    config = rl_config(
        total_steps=1,
        reward="tests.rl.rewards_for_tests.constant",
        algorithm={"kl": {"coef": 0.0}, "zero_variance_groups": "drop"},
    )
    RLTrainer(config).train()
    rows = read_jsonl(Path(config.run_dir) / "trajectories.jsonl")
    assert len(rows) == 6 * 4
    assert all(row["dropped"] and "advantage" not in row for row in rows)


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("reward", "kind"),
    [
        ("raise_on_even_length", "raised"),
        ("dies_on_even_length", "crashed"),
        ("hangs_on_even_length", "timeout"),
        ("nan_on_even_length", "invalid"),
        ("unpicklable_on_even_length", "raised"),
        ("unpicklable_on_even_length", "invalid"),
    ],
)
def test_a_run_goes_on_without_the_samples_whose_reward_fails_and_counts_them(
    rl_config: MakeConfig, reward: str, kind: str, max_staleness: int
) -> None:
    rollout = ROLLOUT | {"prompts_per_step": 2, "reward_timeout": 0.3, "workers": {"rewards": 4}}
    config = rl_config(
        total_steps=2,
        reward=f"tests.rl.rewards_for_tests.{reward}",
        rollout=rollout | {"max_staleness": max_staleness},
    )
    RLTrainer(config).train()
    rows = records(config)
    assert [row["step"] for row in rows] == [1, 2]
    assert sum(row[f"rollout/dropped/reward_{kind}"] for row in rows) > 0
    for row in rows:
        lost = sum(n for name, n in row.items() if name.startswith("rollout/dropped/reward_"))
        failed = sum(n for name, n in row.items() if name.startswith("rollout/failed/"))
        assert row["samples"] + lost == 4 * row["rollout/episodes"]
        assert row["groups"] + failed == row["rollout/episodes"]
    dumped = read_jsonl(Path(config.run_dir) / "trajectories.jsonl")
    assert all(row["length"] % 2 == 1 for row in dumped)


def test_a_reward_that_cannot_be_sent_to_a_worker_ends_the_run_before_it_begins(rl_config: MakeConfig) -> None:
    config = rl_config(reward="tests.rl.rewards_for_tests.unpicklable")
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"cannot be sent to a worker process: .*define it at the top level"):
        RLTrainer(config).train()
    assert time.monotonic() - started < 10
    assert not records(config) and assert_checkpoints_whole(Path(config.run_dir) / "checkpoints") == -1


class FailsOnOdd(RLVRWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        if workflow_context.get().task_id % 2:
            raise OSError("no environment is free")
        return await super().arun_episode(engine, data)


class AlwaysFails(RLVRWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        raise OSError("no environment is free")


class Misshapen(RLVRWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        result = await super().arun_episode(engine, data)
        return result | {"logprobs": result["logprobs"][:, 1:]}


class MisshapenOnOdd(RLVRWorkflow):
    """A column too few, a row too few, or no tensor at all."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        result, task = await super().arun_episode(engine, data), workflow_context.get().task_id
        if task % 2 == 0:
            return result
        wrong = ({"logprobs": result["logprobs"][:, 1:]}, {"rewards": result["rewards"][1:]}, {"versions": [0]})
        return result | wrong[task // 2 % 3]


class Overflows(RLVRWorkflow):
    """Every other prompt is longer than the generator's 64 positions."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        return await super().arun_episode(engine, long_where_odd(data))


class OverflowsInTurns(MultiTurnWorkflow):
    """So are the later turns of every prompt."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        return await super().arun_episode(engine, long_where_odd(data))


def long_where_odd(data: dict[str, Any]) -> dict[str, Any]:
    too_long = "1" * 70
    odd = workflow_context.get().task_id % 2
    return data | {"messages": [{"role": "user", "content": too_long}], "prompt": too_long} if odd else data


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("workflow", "error", "arguments"),
    [
        (FailsOnOdd, "OSError", {}),
        (MisshapenOnOdd, "RolloutError", {}),
        (Overflows, "ContextOverflowError", {}),
        (OverflowsInTurns, "ContextOverflowError", {"max_turns": 30, "retry": "0+0="}),
    ],
)
def test_a_run_goes_on_without_the_episodes_that_fail_and_counts_them(
    rl_config: MakeConfig, workflow: type, error: str, arguments: dict[str, Any], max_staleness: int
) -> None:
    """Later turns that overflow are no failure: the conversation ends there."""
    config = rl_config(total_steps=2, workflow_args=arguments, rollout=ROLLOUT | {"max_staleness": max_staleness})
    trainer = RLTrainer(config)
    trainer.train(workflow=workflow)
    rows = records(config)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0][f"rollout/failed/{error}"] >= 3
    assert all(row["groups"] >= 3 for row in rows)
    assert trainer.engine.version == 2


@pytest.mark.parametrize(
    ("workflow", "max_seq_len", "message"),
    [
        (Misshapen, 64, r"Misshapen.*logprobs"),
        (AlwaysFails, 64, r"AlwaysFails failed on \d+ prompts and succeeded on none.*OSError: no environment is free"),
        (RLVRWorkflow, 4, "leaves no room for an answer within 4"),
    ],
)
def test_a_workflow_that_is_always_wrong_ends_the_run_within_seconds(
    rl_config: MakeConfig, workflow: type, max_seq_len: int, message: str
) -> None:
    generator = {"max_slots": 32, "page_size": 8, "max_seq_len": max_seq_len}
    config = rl_config(generator=generator, rollout=ROLLOUT)
    started = time.monotonic()
    with pytest.raises(WorkflowError, match=message):
        RLTrainer(config).train(workflow=workflow)
    assert time.monotonic() - started < 10
    assert assert_checkpoints_whole(Path(config.run_dir) / "checkpoints") == 0
