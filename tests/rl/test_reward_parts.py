"""Parts of rewards: from a reward function to the columns of a batch, and advantages of each part by itself."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelResponse
from archon.rl import RLVRWorkflow
from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageInputs
from archon.rl.algorithms.config import AlgorithmConfig, GroupRule
from archon.rl.config import RLConfig
from archon.rl.episode import Episode, pack_episodes, unpack_episodes
from archon.rl.episode_context import EpisodeContext
from archon.rl.prompts import Prompt
from archon.rl.rewards import Reward
from archon.rl.rollout import Rollout
from archon.rl.trainer import RLTrainer
from archon.rl.trajectories import join_groups, trajectory_tensors, validate_trajectory
from archon.rl.update import PolicyUpdate
from archon.rl.workflows import MultiTurnWorkflow
from archon.schema.errors import ConfigError, RolloutError
from archon.training.metrics import read_jsonl
from tests.rl import rewards_for_tests as rewards
from tests.rl.conftest import small_run
from tests.rl.objectives import trajectories
from tests.rl.test_rollout import prompts

GCONFIG = GenerationHyperparameters(n_samples=3, max_new_tokens=4)
NO_MODEL: Any = None  # advantages need no model


def update_of(shuffled: bool = False, **algorithm: Any) -> PolicyUpdate:
    config = AlgorithmConfig.parse({"advantage": "gdpo"} | algorithm)
    return PolicyUpdate(NO_MODEL, None, config, temperature=1.0, max_new_tokens=6, shuffle_rewards=shuffled, seed=3)


def advantages_of(update: PolicyUpdate, batch: dict[str, Any]) -> list[float]:
    prepared, _ = update.prepare(batch, step=1)
    return (prepared["advantages"].sum(1) / batch["loss_mask"].sum(1)).tolist()


def test_gdpo_worked_by_hand() -> None:
    # Two groups of three. Right: 1, 0, 0 (mean 1/3, std 0.577350: 1.154701, −0.577350 twice) | 0, 0, 0. Style: 0, 1, 0
    # | 0, 3, 0 (each −0.577350, 1.154701, −0.577350). Sums: 0.577350, 0.577350, −1.154701 | −0.577350, 1.154701,
    # −0.577350. Their squares add up to 4; over 5, the root is 0.894427.
    parts = {"right": torch.tensor([1.0, 0, 0, 0, 0, 0]), "style": torch.tensor([0.0, 1, 0, 0, 3, 0])}
    groups, mask = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, 1)
    of = AdvantageInputs(parts["right"] + parts["style"], groups, mask, reward_parts=parts)
    expected = [0.645497, 0.645497, -1.290994, -0.645497, 1.290994, -0.645497]
    found = ADVANTAGES["gdpo"](of, ADVANTAGES.parse("gdpo")).flatten().tolist()
    assert found == pytest.approx(expected, abs=1e-5)
    # Half the weight of style: the first answer is better than the second.
    weighted = ADVANTAGES["gdpo"](of, ADVANTAGES.parse({"kind": "gdpo", "weights": {"style": 0.5}})).flatten()
    assert weighted[0] > weighted[1] > weighted[2]


@pytest.mark.parametrize("workflow", [RLVRWorkflow, MultiTurnWorkflow])
def test_parts_of_a_reward_are_columns_of_its_group(
    engine: InProcessEngine, tokenizer: Any, workflow: type[RLVRWorkflow]
) -> None:
    """Also where a later turn discounts the reward."""
    several = {"max_turns": 3, "turn_discount": 0.5, "reward_threshold": 99.0, "retry": "0+0="}
    options: dict[str, Any] = {} if workflow is RLVRWorkflow else several
    rollout = Rollout(engine, workflow(rewards.in_parts, GCONFIG.new(n_samples=24), tokenizer, **options))
    (episode,) = asyncio.run(rollout.run(prompts(1)))
    group = episode.trajectories
    assert group is not None
    turns = group["turn_ids"].amax(1) + 1
    assert (len(turns.unique()) > 1) == (workflow is MultiTurnWorkflow)
    assert group["reward/format"].equal(0.25 * 0.5 ** (turns - 1))
    torch.testing.assert_close(group["reward/format"] + group["reward/length"], group["rewards"])


def test_columns_of_parts_survive_joining_and_processes() -> None:
    """A part that a reward lacks is NaN, in its group and in groups without the part."""
    whole = trajectories()
    rows = {name: whole[name][:2] for name in ("input_ids", "attention_mask", "loss_mask", "logprobs", "rewards")}
    one = validate_trajectory({**rows, "versions": rows["input_ids"] * 0, "reward/a": torch.tensor([1.0, torch.nan])})
    other = {name: value for name, value in one.items() if name != "reward/a"} | {"reward/b": torch.tensor([2.0, 3.0])}
    joined = join_groups([one, other])
    nan = pytest.approx(math.nan, nan_ok=True)
    assert joined["reward/a"].tolist() == [1.0, nan, nan, nan]
    assert joined["reward/b"].tolist() == [nan, nan, 2.0, 3.0]
    back = Episode(Prompt(0, {}), EpisodeContext(0))
    unpack_episodes(pack_episodes({0: Episode(Prompt(0, {}), EpisodeContext(0), one)}), [back])
    assert back.trajectories is not None and back.trajectories["reward/a"].tolist() == [1.0, nan]
    with pytest.raises(RolloutError, match=r"trajectory: 'reward/a' is \(3,\), expected a tensor of shape \(2,\)"):
        validate_trajectory(one | {"reward/a": torch.ones(3)})
    with pytest.raises(RolloutError, match="trajectory: 'reward/a' is list, expected a tensor"):
        validate_trajectory(one | {"reward/a": [1.0, 2.0]})
    with pytest.raises(RolloutError, match="'reward/a' holds an infinite number"):
        validate_trajectory(one | {"reward/a": torch.tensor([1.0, torch.inf])})


def test_rewards_of_different_parts_in_a_group() -> None:
    found = trajectory_tensors([answer() for _ in range(3)], [Reward(3.0, {"a": 1.0, "b": 2.0}), 1.0, Reward(0.0)])
    assert found["rewards"].tolist() == [3.0, 1.0, 0.0]
    assert found["reward/a"].tolist() == pytest.approx([1.0, math.nan, math.nan], nan_ok=True)
    assert "reward/a" not in trajectory_tensors([answer()], [1.0])


def answer() -> ModelResponse:
    return ModelResponse([1], [2, 3], [-0.5, -0.5], [0, 0], "stop")


def test_group_of_equal_sums_and_different_parts_has_variance_by_part_alone() -> None:
    def group(**columns: list[float]) -> Episode:
        tensors = {name.replace("_", "/"): torch.tensor(values) for name, values in columns.items()}
        return Episode(Prompt(0, {}), EpisodeContext(0), tensors)

    different = group(rewards=[1.0, 1.0], reward_a=[1.0, 0.0], reward_b=[0.0, 1.0])
    assert different.has_zero_variance(GroupRule("drop")) and not different.is_trainable(GroupRule("drop"))
    assert different.is_trainable(GroupRule("drop", by_part=True))
    equal = group(rewards=[1.0, 1.0], reward_a=[1.0, 1.0], reward_b=[math.nan, 0.0])
    assert not equal.is_trainable(GroupRule("drop", by_part=True)) and equal.is_trainable(GroupRule("keep", True))
    assert not group(rewards=[1.0, 1.0]).is_trainable(GroupRule("drop", by_part=True))
    assert AlgorithmConfig.parse({"preset": "gdpo"}).group_rule == GroupRule("keep", by_part=True)
    assert AlgorithmConfig.parse({"preset": "dapo"}).group_rule == GroupRule("resample", by_part=False)


def test_overlong_penalty_is_a_part_of_its_own() -> None:
    batch, overlong = trajectories(), {"penalty": 0.5, "buffer": 0.5}
    plain, penalized = (advantages_of(update_of(overlong=each), batch) for each in ({}, overlong))
    lengths = batch["loss_mask"].sum(1)
    penalty = 0.5 * ((3 - lengths) / 3).clamp(-1, 0).double()
    assert penalty.unique().numel() > 2
    by_hand = advantages_of(update_of(), batch | {"reward/length": penalty})
    assert penalized == pytest.approx(by_hand, rel=1e-6) and penalized != pytest.approx(plain, rel=1e-2)
    with pytest.raises(RolloutError, match="a part named 'overlong', which is the name of the overlong penalty"):
        advantages_of(update_of(overlong=overlong), batch | {"reward/overlong": penalty})


def test_shuffling_control_permutes_all_parts_alike() -> None:
    batch = trajectories(n=24)
    shuffled = advantages_of(update_of(shuffled=True), batch)
    assert sorted(shuffled) != pytest.approx(sorted(advantages_of(update_of(), batch)), abs=1e-6)
    # The parts of an answer move together: with parts r and −r, every sum stays 0.
    opposite = batch | {"reward/right": batch["rewards"], "reward/style": -batch["rewards"]}
    assert advantages_of(update_of(shuffled=True), opposite) == pytest.approx([0.0] * 24, abs=1e-6)


def test_rewards_without_parts_unknown_names_and_parts_that_cannot_be_are_refused() -> None:
    batch = trajectories()
    bare = {name: value for name, value in batch.items() if not name.startswith("reward/")}
    with pytest.raises(RolloutError, match="gdpo normalizes each part of a reward, but 9 of 9 rewards have no parts"):
        advantages_of(update_of(), bare)
    some = torch.where(torch.arange(9) < 2, torch.nan, batch["rewards"])
    with pytest.raises(RolloutError, match="but 2 of 9 rewards have no parts"):
        advantages_of(update_of(), bare | {"reward/right": some})
    unknown = {"kind": "gdpo", "weights": {"styl": 1.0}}
    with pytest.raises(RolloutError, match=r"weights names 'styl', but the rewards have the parts 'right', 'style'"):
        advantages_of(update_of(advantage=unknown), batch)
    with pytest.raises(
        ConfigError, match="advantage gdpo normalizes the parts of a reward, but `rewards` changes their sum"
    ):
        update_of(rewards={"clip": 1.0})
    with pytest.raises(ConfigError, match=r"which a KL is not; set kl\.place=loss"):
        update_of(kl={"coef": 0.1, "place": "reward"})


def test_a_run_trains_on_parts(blank: Path, tmp_path: Path) -> None:
    run = small_run(blank, tmp_path / "run") | {"reward": "tests.rl.rewards_for_tests.in_parts", "total_steps": 2}
    RLTrainer(RLConfig.parse(run | {"algorithm": {"preset": "gdpo"}})).train()
    records = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(records) == 2 and all(row["advantage_std"] > 0 and row["grad_norm"] > 0 for row in records)
