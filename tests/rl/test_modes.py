"""Modes of a run: an explorer and a trainer with a buffer between them, and a bench, each as it would run alone."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.rl import RLTrainer, make_trainer
from archon.rl.config import RLConfig
from archon.rl.experience_buffer import ExperienceBuffer, split_groups
from archon.rl.modes import group_numbers
from archon.rl.prompts import Prompt
from archon.schema.errors import ConfigError, RolloutError
from archon.training.metrics import read_jsonl

MakeConfig = Callable[..., RLConfig]


def group(n: int, length: int) -> dict[str, Any]:
    """Trajectories that the number `n` tells from others."""
    shape = (2, length)
    fields = {"input_ids": torch.full(shape, n), "logprobs": torch.full(shape, -0.5), "versions": torch.full(shape, n)}
    fields |= {"loss_mask": torch.ones(shape).long(), "attention_mask": torch.ones(shape).bool()}
    return {**fields, "rewards": torch.tensor([float(n), 0.0])}


def prompts(*numbers: int) -> list[Prompt]:
    return [Prompt(n, {"answer": str(n)}) for n in numbers]


def test_groups_come_back_as_they_went_in_with_the_explorers_position(tmp_path: Path) -> None:
    buffer = ExperienceBuffer(tmp_path / "deep" / "b.db")
    assert len(buffer) == 0 and buffer.explorer_state() is None and not buffer.finished
    buffer.append([group(1, 3), group(2, 5)], prompts(1, 2), 1, {"cursor": 2})
    buffer.append([group(3, 4)], prompts(3), 2, {"cursor": 3})
    assert len(buffer) == 3 and buffer.explorer_state() == (2, {"cursor": 3})
    second, first = ExperienceBuffer(buffer.path).read([1, 0])
    assert first.prompt == prompts(1)[0] and second.prompt.row == {"answer": "2"}
    assert second.trajectories is not None
    for name, value in group(2, 5).items():
        assert second.trajectories[name].equal(value) and second.trajectories[name].dtype == value.dtype
    buffer.finish()
    assert buffer.finished
    with pytest.raises(RolloutError, match="group 7 is missing"):
        buffer.read([7])


def test_a_batch_is_split_into_groups_without_the_padding_of_others(tmp_path: Path) -> None:
    trajectories = {name: torch.cat([value, value]) for name, value in group(1, 6).items()}
    trajectories["attention_mask"][:2, 4:] = False
    trajectories |= {"group_ids": torch.tensor([0, 0, 1, 1]), "trajectory_ids": torch.arange(4)}
    short, long = split_groups(trajectories)
    assert short["input_ids"].shape == (2, 4) and long["input_ids"].shape == (2, 6)
    assert short["rewards"].tolist() == [1.0, 0.0] and long["trajectory_ids"].tolist() == [2, 3]
    assert "group_ids" not in short


@pytest.mark.slow
def test_a_step_is_there_with_its_position_or_not_at_all(tmp_path: Path) -> None:
    """The process dies in the middle of an insertion: by a signal, as a full transaction would be lost."""
    path = tmp_path / "b.db"
    ExperienceBuffer(path).append([group(1, 3)], prompts(1), 1, {"cursor": 1})
    program = f"""
import os, signal
from archon.rl import experience_buffer
from tests.rl.test_modes import group, prompts
done = []
def dying(*arguments):
    if done:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(1)
    return packed(*arguments)
packed, experience_buffer.pack_episodes = experience_buffer.pack_episodes, dying
experience_buffer.ExperienceBuffer({str(path)!r}).append([group(2, 3), group(3, 3)], prompts(2, 3), 2, {{"cursor": 3}})
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], env=os.environ.copy())
    assert ended.returncode == -signal.SIGKILL
    buffer = ExperienceBuffer(path)
    assert len(buffer) == 1 and buffer.explorer_state() == (1, {"cursor": 1})
    buffer.append([group(2, 3)], prompts(2), 2, {"cursor": 2})
    assert len(buffer) == 2


def test_what_is_no_buffer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database, but long enough to be read as one" * 20)
    with closing_sqlite(tmp_path / "other.db") as file:
        file.execute("CREATE TABLE t (x)")
    for name, message in (
        ("text.db", "cannot be used: file is not a database"),
        ("other.db", "not an experience"),
    ):
        with pytest.raises(RolloutError, match=message):
            len(ExperienceBuffer(tmp_path / name))


def closing_sqlite(path: Path) -> Any:
    from contextlib import closing

    return closing(sqlite3.connect(path, isolation_level=None))


@pytest.fixture
def alone(rl_config: MakeConfig, tmp_path: Path) -> Callable[..., RLConfig]:
    """A run of one mode, in a folder of its own, with the buffer that all share."""

    def make(mode: str, **changes: Any) -> RLConfig:
        experiences = {"path": str(tmp_path / "buffer.db"), "weights_from": str(tmp_path / "train")}
        given = {"mode": mode, "run_dir": str(tmp_path / mode), "total_steps": 3, "resume": True}
        given["rollout"] = {"prompts_per_step": 4, "n_gold_checks": 0, "workers": {"rewards": 1}}
        return rl_config(**given | changes | {"experiences": experiences | changes.get("experiences", {})})

    return make


@pytest.mark.slow
def test_what_is_explored_is_trained_on_once_in_order_as_in_one_process(alone: Any, rl_config: Any, tmp_path) -> None:
    make_trainer(alone("explore")).train()
    buffer = ExperienceBuffer(tmp_path / "buffer.db")
    assert len(buffer) == 12 and buffer.finished
    explored = read_jsonl(tmp_path / "explore" / "metrics.jsonl")
    assert [record["step"] for record in explored] == [1, 2, 3] and explored[-1]["groups"] == 4

    trainer = make_trainer(alone("train", total_steps=10))
    trainer.train()
    records = read_jsonl(tmp_path / "train" / "metrics.jsonl")
    assert [record["experiences"] for record in records] == [4, 8, 12]  # it ended where the buffer does
    assert [r["reward"] for r in records] == pytest.approx([r["reward"] for r in explored])
    assert all(record["grad_norm"] > 0 for record in records) and records[0]["staleness_max"] == 0
    assert [record["staleness_max"] for record in records] == [0, 1, 2]

    # The first step, sampled with the weights that it updates, is that of a run in one process.
    RLTrainer(
        rl_config(total_steps=1, rollout={"prompts_per_step": 4, "n_gold_checks": 0, "workers": {"rewards": 1}})
    ).train()
    (together,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for name in ("reward", "loss", "grad_norm", "entropy", "first_logprob_diff"):
        assert together[name] == pytest.approx(records[0][name], rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_an_explorer_that_was_stopped_goes_on_and_takes_the_trainers_weights(alone: Any, tmp_path: Path) -> None:
    make_trainer(alone("explore", total_steps=1)).train()
    make_trainer(alone("train", total_steps=1, checkpoint={"every": 1})).train()
    make_trainer(alone("explore", total_steps=2)).train()
    episodes = ExperienceBuffer(tmp_path / "buffer.db").read(range(8))
    assert [episode.prompt.index for episode in episodes] == list(range(8))
    versions = [int(e.trajectories["versions"].max()) for e in episodes if e.trajectories]
    assert versions == [0] * 4 + [1] * 4
    # The resumed trainer goes on behind what it was trained on, with a checked first batch.
    trainer = make_trainer(alone("train", total_steps=2))
    trainer.train()
    records = read_jsonl(tmp_path / "train" / "metrics.jsonl")
    assert [record["experiences"] for record in records] == [4, 8] and records[-1]["staleness_max"] == 0
    assert records[-1]["first_logprob_diff"] < 1e-4


@pytest.mark.slow
def test_passes_say_how_often_a_group_is_trained_on(alone: Any, tmp_path: Path) -> None:
    make_trainer(alone("explore", total_steps=1)).train()
    rollout = {"prompts_per_step": 3, "n_gold_checks": 0, "workers": {"rewards": 1}}
    make_trainer(alone("train", total_steps=10, rollout=rollout, experiences={"passes": 2})).train()
    records = read_jsonl(tmp_path / "train" / "metrics.jsonl")
    assert [(r["experiences"], r["groups"]) for r in records] == [(3, 3), (6, 3), (8, 2)]


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize(("pass_boundaries", "size"), [((), 4), ((3,), 3), ((3,), 5), ((2, 5), 5), ((1, 4), 6)])
def test_groups_of_several_passes_are_numbered_as_a_plain_loop_does(
    pass_boundaries: tuple[int, ...], size: int, passes: int
) -> None:
    order: list[int] = []
    first = 0
    for end in pass_boundaries:
        for _ in range(passes):
            order += range(first, end)
        first = end
    order += range(first, size)
    for start in range(len(order) + 2):
        for count in (1, 3, len(order)):
            assert group_numbers(start, count, size, pass_boundaries, passes) == order[start : start + count]


@pytest.mark.slow
def test_what_an_explorer_adds_when_resumed_gets_its_own_passes(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is in its second pass over the groups of the first step, when the explorer adds another step's."""
    read, seen = ExperienceBuffer.read, list[int]()

    def noted(buffer: ExperienceBuffer, numbers: Any) -> Any:
        seen.extend(numbers)
        return read(buffer, numbers)

    monkeypatch.setattr(ExperienceBuffer, "read", noted)
    rollout = {"prompts_per_step": 3, "n_gold_checks": 0, "workers": {"rewards": 1}}
    make_trainer(alone("explore", total_steps=1)).train()
    make_trainer(alone("train", total_steps=2, rollout=rollout, experiences={"passes": 2})).train()
    make_trainer(alone("explore", total_steps=2)).train()
    make_trainer(alone("train", total_steps=20, rollout=rollout, experiences={"passes": 2})).train()
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]


def test_a_trainer_whose_explorer_is_gone_says_so(alone: Any, tmp_path: Path) -> None:
    ExperienceBuffer(tmp_path / "buffer.db").append([], [], 0, {})
    with pytest.raises(RolloutError, match=r"has 0 groups \(0 trained\).*experiences\.wait_seconds"):
        make_trainer(alone("train", experiences={"wait_seconds": 0.1})).train()


@pytest.mark.slow
def test_a_buffer_of_an_earlier_run_is_not_added_to_unasked(alone: Any) -> None:
    make_trainer(alone("explore", total_steps=1)).train()
    with pytest.raises(ConfigError, match="holds 4 groups of an earlier run; set resume=true"):
        make_trainer(alone("explore", run_dir=str(Path(alone("explore").run_dir).parent / "new"), resume=False)).train()


@pytest.mark.slow
@pytest.mark.parametrize(("latest_only", "checkpoints"), [(False, [1, 2]), (True, [2])])
def test_a_bench_evaluates_the_checkpoints(alone: Any, tmp_path: Path, latest_only: bool, checkpoints: list) -> None:
    make_trainer(alone("explore", total_steps=2)).train()
    make_trainer(alone("train", total_steps=2, checkpoint={"every": 1, "keep": 5})).train()
    data = {"path": "arithmetic", "split": "test", "limit": 3}
    bench = alone("bench", eval_data=data, evaluation={"greedy": False}, experiences={"latest_only": latest_only})
    make_trainer(bench).train()
    records = read_jsonl(tmp_path / "bench" / "metrics.jsonl")
    assert [record["checkpoint"] for record in records] == checkpoints
    assert all(0 <= record["eval/reward"] <= 1 for record in records)
    assert not (tmp_path / "bench" / "export").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "train"}, "mode is train, and experiences are not set"),
        ({"experiences": {"path": "x"}}, "mode is both, and experiences are set"),
        ({"mode": "explore", "experiences": {}}, "needs the buffer's file: set experiences.path"),
        ({"mode": "bench", "experiences": {}}, "mode bench evaluates: set eval_data"),
        (
            {"mode": "train", "experiences": {"path": "x"}, "rollout": {"max_staleness": 1}},
            "max_staleness is 1 with mode train",
        ),
    ],
)
def test_a_mode_that_lacks_a_part_is_refused(rl_config: MakeConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl_config(**changes)


def test_a_trainer_of_another_mode_is_refused(alone: Any) -> None:
    with pytest.raises(ConfigError, match=r"RLTrainer runs mode .both., got mode .explore.; use make_trainer"):
        RLTrainer(alone("explore"))


def test_explorer_loads_the_newest_checkpoint_every_few_steps(alone: Any, tmp_path: Path) -> None:
    """Resumed at step 1 with `sync_every` 2, it keeps its weights until step 2."""
    make_trainer(alone("explore", total_steps=1)).train()
    make_trainer(alone("train", total_steps=1, checkpoint={"every": 1})).train()
    make_trainer(alone("explore", total_steps=4, experiences={"sync_every": 2})).train()
    episodes = ExperienceBuffer(tmp_path / "buffer.db").read(range(4, 16))
    versions = [int(e.trajectories["versions"].max()) for e in episodes if e.trajectories]
    assert versions == [0] * 4 + [1] * 8
