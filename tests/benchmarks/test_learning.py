"""The learning tasks: their data, their configurations, and one of them from its first step to its last."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.cli.config import load_config, read_values
from archon.rl.bootstrap import ensure_checkpoint
from archon.rl.config import RLConfig
from archon.rl.trainer import RLTrainer
from archon.training.config import BootstrapConfig, PreferenceConfig
from archon.training.metrics import read_jsonl
from benchmarks.learning import calculator, preferences, walking
from benchmarks.learning.__main__ import TASKS, run
from benchmarks.watch import verdict


def fields(config: dict[str, Any]) -> list[tuple[str, str]]:
    """(section, key) of everything that a configuration says in a section."""
    return [(name, key) for name, section in config.items() if isinstance(section, dict) for key in section]


@pytest.mark.parametrize("name", TASKS)
def test_a_control_differs_from_its_task_in_the_signal_alone(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    schema: Any = {"rl": RLConfig, "preference": PreferenceConfig}[task.command]
    given, control = (
        load_config(schema, task.config, [f"run_dir={tmp_path}", *changes]).model_dump()
        for changes in (task.changes, (*task.changes, *task.control))
    )
    different = {(section, key) for section, key in fields(given) if given[section][key] != control[section][key]}
    expected = {"dpo": ("train_data", "split"), "distillation": ("teacher", "path")}.get(
        name, ("control", "shuffle_rewards")
    )
    assert different == {expected}
    assert {name for name in given if given[name] != control[name]} == {expected[0]}


@pytest.mark.parametrize("task", [walking, calculator, preferences])
def test_nothing_held_out_is_trained_on(task: Any) -> None:
    train, test = ({row["prompt"] for row in task.rows(split)} for split in ("train", "test"))
    assert train and test and not train & test
    if task is not preferences:
        asked = {(row.get("messages") or row["prompt"])[0]["content"] for row in task.rows("warm")}
        assert asked <= train


def test_every_letter_asked_for_can_be_reached_in_time() -> None:
    for row in [*walking.rows("train"), *walking.rows("test")]:
        assert any(walked(row, moves) for moves in itertools.product(walking.MOVES, repeat=walking.STEPS)), row


def test_a_walk_step_by_step_is_a_row_a_step_without_the_earlier_ones(tmp_path: Path) -> None:
    bootstrap = read_values(TASKS["step_wise_grpo"].config.with_name("walking_bootstrap.yaml"), ["warmup=null"])
    (tmp_path / "bootstrap.yaml").write_text(yaml.safe_dump(bootstrap))
    given = [f"run_dir={tmp_path}", f"bootstrap={tmp_path / 'bootstrap.yaml'}", "rollout.prompts_per_step=4"]
    given += ["algorithm.zero_variance_groups=keep"]
    config = load_config(RLConfig, TASKS["step_wise_grpo"].config, [*TASKS["step_wise_grpo"].changes, *given])
    ensure_checkpoint(load_config(BootstrapConfig, tmp_path / "bootstrap.yaml", []), config.actor.path)
    with RLTrainer(config).opened() as trainer:
        batch = trainer.rollout_batch().trajectories
        prepared, _ = trainer.update.prepare(batch, 0)
    rows = [ids[mask == 0].tolist() for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)]
    prompts = {bytes(trainer.tokenizer.decode(row, skip_special_tokens=True), "ascii") for row in rows}
    assert all(len(prompt) == 3 and prompt[1:2] == b">" for prompt in prompts), prompts
    runs = batch["trajectory_ids"].unique(return_counts=True)[1]
    assert len(runs) == 32 and runs.max() == walking.STEPS
    for run_id in batch["trajectory_ids"].unique():
        steps = batch["trajectory_ids"] == run_id
        assert len(batch["rewards"][steps].unique()) == 1
        trained = prepared["advantages"][steps][batch["loss_mask"][steps] == 1]
        assert (trained == trained[0]).all()


def walked(row: dict[str, Any], moves: Iterable[str]) -> bool:
    """Whether some of the moves lead there."""
    env = walking.Walking()
    env.reset(row)
    return any(done and reward == 1 for _, reward, done, _ in map(env.step, moves))


def test_a_step_beyond_the_alphabet_and_what_is_no_step_lead_nowhere() -> None:
    env = walking.Walking()
    assert env.reset({"prompt": "b>d"}) == "b>d"
    assert [env.step(move) for move in ("-4", "?", "+4")] == [
        ("a>d", 0.0, False, {}),
        ("a>d", 0.0, False, {}),
        ("e>d", 0.0, False, {}),
    ]
    assert env.step("-1") == ("d>d", 1.0, True, {})


def test_the_calculator_says_what_it_cannot_do() -> None:
    assert calculator.multiply('{"a": 12, "b": 13}') == "156"
    assert {calculator.multiply(said) for said in ("", "[]", '{"a": 1}', '{"a": "x", "b": 2}', "null")} == {"error"}


def test_preferences_prefer_the_larger_number_and_shuffled_ones_do_not() -> None:
    def larger(row: dict[str, Any]) -> bool:
        numbers = sorted(row["prompt"].rstrip("=").split("?"))
        assert numbers == sorted([row["chosen"], row["rejected"]])
        return row["chosen"] == numbers[1]

    assert all(map(larger, preferences.rows("train")))
    shuffled = preferences.rows("shuffled")
    assert 0.45 < sum(map(larger, shuffled)) / len(shuffled) < 0.55


def test_the_two_numbers_of_a_held_out_pair_are_in_no_other_pair() -> None:
    def numbers(split: str) -> set[frozenset[str]]:
        return {frozenset(row["prompt"].rstrip("=").split("?")) for row in preferences.rows(split)}

    assert not numbers("test") & (numbers("train") | numbers("warm") | numbers("shuffled"))


def test_a_soak_sees_what_grows() -> None:
    still = [{"mib": 100.0, "files": 20.0, "sockets": 5.0 + i % 7, "threads": 9.0, "processes": 2.0} for i in range(90)]
    assert verdict(still)["flat"]
    for name in still[0]:
        assert not verdict([seen | {name: seen[name] * (1 + i / 100)} for i, seen in enumerate(still)])["flat"], name


@pytest.mark.slow
def test_the_agent_runs_from_its_warm_up_to_its_export(tmp_path: Path) -> None:
    short = ["warmup.total_steps=3", "warmup.scheduler.warmup_steps=1"]
    bootstrap = read_values(TASKS["calculator"].config.with_name("calculator_bootstrap.yaml"), short)
    (tmp_path / "bootstrap.yaml").write_text(yaml.safe_dump(bootstrap))
    changes = (f"bootstrap={tmp_path / 'bootstrap.yaml'}", "total_steps=2", "eval_data.limit=8", "gconfig.n_samples=2")
    found = run("calculator", TASKS["calculator"], tmp_path, changes, control=False)
    assert found["code"] == 0 and found["steps"] == 2 and not found["reached"]
    assert all(row["rollout/episodes"] == 16 for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"])
