"""Advantages against hand-worked numbers and a plain-loop reference."""

from __future__ import annotations

import statistics

import pytest
import torch

from archon.rl.algorithms.advantages import ADVANTAGES, group_normalized_advantages, groups_with_spread
from archon.rl.config import AlgorithmConfig
from archon.schema.errors import ConfigError
from tests.tolerances import FORMULA_FP32


def plain_grpo(rewards: list[float], groups: list[int], eps: float) -> list[float]:
    """DeepSeekMath, section 4.1.2, one group at a time, with the unbiased standard deviation."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        std = statistics.stdev(members) if len(members) > 1 else 0.0
        out.append((reward - statistics.fmean(members)) / (std + eps) if max(members) > min(members) else 0.0)
    return out


def test_grpo_advantage_worked_by_hand() -> None:
    # Group 0: rewards 1, 0, 0, 1: mean 1/2, deviations ±1/2, variance (4 · 1/4) / 3 = 1/3, std 0.57735,
    # so A = ±0.5 / 0.57735 = ±0.866025. Group 1: 2, 5: mean 3.5, variance (2.25 + 2.25) / 1 = 4.5, std 2.12132,
    # A = ∓1.5 / 2.12132 = ∓0.707107. (eps of 1e-6 moves the sixth digit at most.)
    rewards = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 5.0])
    groups = torch.tensor([0, 0, 1, 0, 0, 1])
    expected = torch.tensor([0.866025, -0.866025, -0.707107, -0.866025, 0.866025, 0.707107])
    torch.testing.assert_close(group_normalized_advantages(rewards, groups), expected, rtol=0, atol=3e-6)


def test_grpo_advantage_equals_plain_loop_with_uneven_interleaved_groups() -> None:
    generator = torch.Generator().manual_seed(3)
    groups = torch.randint(0, 6, (41,), generator=generator)
    rewards = torch.rand(41, generator=generator)
    expected = plain_grpo(rewards.tolist(), groups.tolist(), 1e-6)
    actual = group_normalized_advantages(rewards, groups)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=FORMULA_FP32, atol=FORMULA_FP32)


def test_group_of_equal_rewards_has_exactly_zero_advantage() -> None:
    """0.1 is not representable: the mean of seven of them is off by an ulp, which over eps would look like a signal."""
    rewards = torch.full((7,), 0.1)
    assert group_normalized_advantages(rewards, torch.zeros(7, dtype=torch.int)).abs().max() == 0


def test_group_of_one_is_no_signal() -> None:
    assert group_normalized_advantages(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]


def test_groups_with_spread_marks_every_member() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 2.0, 1.0])
    assert groups_with_spread(rewards, torch.tensor([0, 1, 1, 2, 0])).tolist() == [False, True, True, False, False]


def test_advantage_table_has_the_preset_and_names_the_nearest_on_a_typo() -> None:
    config = AlgorithmConfig()
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    from_table = ADVANTAGES[config.advantage](rewards, groups, config)
    assert from_table.equal(group_normalized_advantages(rewards, groups, 1e-6))
    with pytest.raises(ConfigError, match="unknown advantage 'gpro', did you mean 'grpo'"):
        ADVANTAGES["gpro"]
