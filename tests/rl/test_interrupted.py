"""Ctrl-C and SIGTERM in every phase: the run ends within seconds in one line, and continues where it stood.

A synchronous run continues bitwise; one whose rollouts run ahead trains each prompt exactly once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.cli import main
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.training.config import PreferenceConfig
from archon.training.preference import PreferenceTrainer
from tests.checkpoint.killing import assert_checkpoints_whole
from tests.rl.conftest import small_run
from tests.rl.interrupted_run import Ended
from tests.rl.objectives import write_pairs
from tests.rl.written import (
    assert_bitwise_equal_results,
    assert_bitwise_equal_runs,
    assert_each_prompt_trained_once,
)
from tests.small_qwen3 import SMALL_QWEN3

MakeConfig = Callable[..., RLConfig]
NOTHING = -1
SECONDS = 30
"""Within which a run ends. It takes a second or two, and on a busy machine some more; what it waited for, an hour."""


def common(folder: Path, **changes: Any) -> dict[str, Any]:
    evaluation = {
        "eval_data": {"path": "arithmetic", "split": "test"},
        "evaluation": {"every": 2, "max_prompts": 4, "greedy": False},
    }
    return {"run_dir": str(folder / "run"), "resume": True, "checkpoint": {"every": 1}, **evaluation, **changes}


def assert_ended_well(ended: Ended, number: signal.Signals) -> None:
    assert ended.exit_code == 128 + number, ended.errors
    assert ended.errors == [f"archon: {number.name}: saving, then exiting; press Ctrl-C again to exit now"]
    assert ended.seconds < SECONDS
    assert ended.orphans == []


@pytest.fixture(scope="module")
def whole(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> RLConfig:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    config = RLConfig.parse(small_run(blank, folder / "run") | common(folder))
    RLTrainer(config).train()
    return config


@pytest.mark.parametrize(
    ("point", "number", "saved"),
    [
        ("data", signal.SIGINT, NOTHING),
        pytest.param("models", signal.SIGINT, 0, marks=pytest.mark.slow),
        ("gold", signal.SIGINT, NOTHING),
        ("rollout", signal.SIGINT, 2),
        pytest.param("rollout", signal.SIGTERM, 2, marks=pytest.mark.slow),
        pytest.param("reward", signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param("update", signal.SIGINT, 3, marks=pytest.mark.slow),
        pytest.param("push", signal.SIGINT, 3, marks=pytest.mark.slow),
        ("evaluation", signal.SIGINT, 2),
        # The second checkpoint is written while the third step goes on, which is trained if its rollout is over.
        pytest.param("save", signal.SIGINT, (2, 3), marks=pytest.mark.slow),
        pytest.param("export", signal.SIGTERM, 4, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_and_the_resumed_one_is_bitwise_the_whole(
    rl_config: MakeConfig,
    tmp_path: Path,
    whole: RLConfig,
    point: str,
    number: signal.Signals,
    saved: int | tuple[int, ...],
) -> None:
    config = rl_config(**common(tmp_path))
    ended = Ended(config, point, number)
    assert_ended_well(ended, number)
    assert assert_checkpoints_whole(tmp_path / "run" / "checkpoints") in (
        saved if isinstance(saved, tuple) else (saved,)
    )
    RLTrainer(config).train()
    assert_bitwise_equal_runs(config, whole)


SCORED = {"algorithm": {"kl": {"coef": 0.05}, "policy_loss": "decoupled", "correction": "tis"}}


@pytest.fixture(scope="module")
def whole_scored(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> RLConfig:
    """A run with a reference and a proximal policy that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole_scored")
    reference = {"ref": {"path": str(blank), "init_from_scratch": True, "seed": 1}}
    config = RLConfig.parse(small_run(blank, folder / "run") | common(folder, **SCORED, **reference))
    RLTrainer(config).train()
    return config


@pytest.mark.parametrize("point", ["reference", pytest.param("proximal", marks=pytest.mark.slow)])
def test_a_signal_while_a_batch_is_scored_lets_its_step_end(
    rl_config: MakeConfig, tmp_path: Path, whole_scored: RLConfig, point: str
) -> None:
    assert whole_scored.ref is not None
    config = rl_config(**common(tmp_path, **SCORED, ref=whole_scored.ref))
    assert_ended_well(Ended(config, point), signal.SIGINT)
    assert assert_checkpoints_whole(tmp_path / "run" / "checkpoints") == 3
    RLTrainer(config).train()
    assert_bitwise_equal_runs(config, whole_scored)


@pytest.mark.slow
def test_a_signal_while_an_agent_reads_a_stream_and_the_resumed_run_trains_each_prompt_exactly_once(
    rl_config: MakeConfig, tmp_path: Path
) -> None:
    config = rl_config(**common(tmp_path, workflow="tests.rl.interrupted_run.Asks"))
    assert_ended_well(Ended(config, "agent"), signal.SIGINT)
    assert assert_checkpoints_whole(tmp_path / "run" / "checkpoints") == 2
    RLTrainer(config).train()
    assert_each_prompt_trained_once(config)


@pytest.fixture(scope="module")
def whole_of_pairs(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> PreferenceConfig:
    """A run on pairs that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole_of_pairs")
    write_pairs(folder)
    data = {"train_data": {"path": str(folder)}, "eval_data": {"path": str(folder), "split": "test"}, "eval_every": 2}
    model = {"path": str(blank), "init_from_scratch": True, "optimizer": {"lr": 1e-3}}
    run = {"run_dir": str(folder / "run"), "resume": True, "checkpoint": {"every": 1}, "total_steps": 4}
    config = PreferenceConfig.parse(run | data | {"model": model, "batch_size": 8})
    PreferenceTrainer(config).train()
    return config


@pytest.mark.parametrize(
    ("point", "number", "saved"),
    [
        ("pairs", signal.SIGINT, 3),
        pytest.param("pairs-update", signal.SIGTERM, 3, marks=pytest.mark.slow),
        pytest.param("pairs-evaluation", signal.SIGINT, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_on_pairs_after_its_step_and_the_resumed_one_is_bitwise_the_whole(
    tmp_path: Path, whole_of_pairs: PreferenceConfig, point: str, number: signal.Signals, saved: int
) -> None:
    config = whole_of_pairs.model_copy(update={"run_dir": str(tmp_path / "run")})
    assert_ended_well(Ended(config, point, number), number)
    assert assert_checkpoints_whole(tmp_path / "run" / "checkpoints") == saved
    PreferenceTrainer(config).train()
    assert_bitwise_equal_results(config, whole_of_pairs)


@pytest.mark.parametrize("point", ["rollout", pytest.param("update", marks=pytest.mark.slow)])
def test_a_signal_while_rollouts_run_ahead_and_the_resumed_run_trains_each_prompt_exactly_once(
    rl_config: MakeConfig, tmp_path: Path, point: str
) -> None:
    config = rl_config(**common(tmp_path, rollout={"prompts_per_step": 6, "dump_groups": 6, "max_staleness": 1}))
    ended = Ended(config, point)
    assert_ended_well(ended, signal.SIGINT)
    assert assert_checkpoints_whole(tmp_path / "run" / "checkpoints") >= 1
    RLTrainer(config).train()
    assert_each_prompt_trained_once(config, ahead=6)


@pytest.mark.slow
def test_a_signal_in_a_multi_turn_run_and_the_resumed_one_trains_each_prompt_exactly_once(
    rl_config: MakeConfig, tmp_path: Path
) -> None:
    turns = {"workflow": "archon.rl.MultiTurnWorkflow", "workflow_args": {"max_turns": 2, "retry": "0+0="}}
    config = rl_config(**common(tmp_path, **turns))
    ended = Ended(config, "update")
    assert_ended_well(ended, signal.SIGINT)
    assert assert_checkpoints_whole(tmp_path / "run" / "checkpoints") == 3
    RLTrainer(config).train()
    assert_each_prompt_trained_once(config)


def test_a_second_signal_leaves_at_once_and_the_run_goes_on_from_its_last_whole_checkpoint(
    rl_config: MakeConfig, tmp_path: Path, whole: RLConfig
) -> None:
    config = rl_config(**common(tmp_path))
    ended = Ended(config, "twice")
    assert ended.exit_code == 128 + signal.SIGINT
    assert ended.errors[1:] == ["archon: exiting now without saving"]
    assert ended.seconds < SECONDS
    assert ended.orphans == []
    assert assert_checkpoints_whole(tmp_path / "run" / "checkpoints") in (1, 2)
    RLTrainer(config).train()
    assert_bitwise_equal_runs(config, whole)


@pytest.mark.slow
def test_a_signal_in_the_warm_up_ends_the_run_in_one_line(rl_config: MakeConfig, tmp_path: Path) -> None:
    tokenizer = {"kind": "characters", "alphabet": "0123456789+=", "chat_template": "plain"}
    warmup = {"total_steps": 3, "batch_size": 8, "train_data": {"path": "arithmetic"}}
    config = rl_config(
        **common(tmp_path, total_steps=1),
        actor={"path": str(tmp_path / "model"), "optimizer": {"lr": 1e-3}},
        bootstrap=str(tmp_path / "bootstrap.yaml"),
    )
    made = {"hf_config": SMALL_QWEN3, "tokenizer": tokenizer, "warmup": warmup}
    (tmp_path / "bootstrap.yaml").write_text(yaml.safe_dump(made))
    assert_ended_well(Ended(config, "warm-up"), signal.SIGINT)
    with pytest.raises(SystemExit) as left:
        main(["rl", "--config", str(tmp_path / "run.yaml")])
    assert left.value.code == 0
    assert_each_prompt_trained_once(config)


def test_a_signal_before_the_run_has_begun_leaves_nothing_behind(rl_config: MakeConfig, tmp_path: Path) -> None:
    ended = Ended(rl_config(**common(tmp_path)), "start")
    assert (ended.exit_code, ended.errors) == (128 + signal.SIGINT, ["archon: interrupted"])
    assert not (tmp_path / "run").exists()
