"""Advantages against hand-worked numbers and plain loops over one trajectory at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.rl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageSettings,
    Groups,
    RewardConfig,
    generalized_advantages,
    overlong_penalty,
)
from archon.rl.algorithms.presets import PRESETS
from archon.schema.errors import ConfigError
from tests.rl.formulas import plain_advantages, plain_penalty
from tests.tolerances import FORMULA_FP32, FORMULA_FP64


def settings_of(kind: str, **given: Any) -> AdvantageSettings:
    settings: AdvantageSettings = ADVANTAGES.parse({"kind": kind, **given})
    return settings


GROUP_ADVANTAGES = {kind for kind in ADVANTAGES if settings_of(kind).is_group_relative}
# A baseline below the mean is a signal where all rewards are equal.
CENTERED = GROUP_ADVANTAGES - {"asymre"}
OF_STEPS = {kind for kind in ADVANTAGES if settings_of(kind).needs_steps}


def test_the_advantages_that_compare_a_group_and_those_that_need_a_critic() -> None:
    assert {
        *("grpo", "dr_grpo", "rloo", "opmd", "reinforce_baseline", "asymre", "lite_ppo", "step_wise_grpo", "gigpo"),
        *("maxrl", "gdpo"),
    } == GROUP_ADVANTAGES
    assert {kind for kind in ADVANTAGES if settings_of(kind).needs_critic} == {"gae"}
    assert {kind for kind in ADVANTAGES if settings_of(kind).needs_teacher} == {"distill"}


def inputs(n: int = 23, width: int = 9, seed: int = 0, *, critic: bool = True) -> AdvantageInputs:
    """Interleaved groups of uneven sizes, answers of one to `width` tokens with gaps between turns, float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.randint(0, 2, (n, width), generator=generator)
    mask[:, 3] = 1  # at least one token each
    rewards = torch.randint(0, 3, (n,), generator=generator).double()
    style = noise(n)
    style[::4] = torch.nan  # rewards without this part
    return AdvantageInputs(
        rewards=rewards,
        reward_parts={"right": rewards, "style": style},
        group_ids=torch.randint(0, 5, (n,), generator=generator),
        loss_mask=mask,
        token_rewards=0.1 * noise(n, width),
        values=noise(n, width) if critic else None,
        logprobs=-noise(n, width).abs(),
        teacher_logprobs=-noise(n, width).abs(),
    )


def in_one_part(rewards: Tensor, group_ids: Tensor, loss_mask: Tensor) -> AdvantageInputs:
    return AdvantageInputs(rewards, group_ids, loss_mask, reward_parts={"right": rewards})


@pytest.mark.parametrize("kind", sorted(set(ADVANTAGES) - OF_STEPS))  # those are in test_step_advantages
def test_advantage_equals_plain_loop(kind: str) -> None:
    given: dict[str, dict[str, Any]] = {"gae": {"gamma": 0.97, "lam": 0.9}, "opmd": {"tau": 0.7}}
    given["asymre"] = {"shift": -0.3}
    given["gdpo"] = {"weights": {"style": 0.3}}
    of, settings = inputs(), settings_of(kind, **given.get(kind, {}))
    expected = torch.tensor(plain_advantages(of, settings), dtype=torch.float64)
    torch.testing.assert_close(ADVANTAGES[kind](of, settings), expected, rtol=FORMULA_FP64, atol=FORMULA_FP64)


@pytest.mark.parametrize("kind", sorted(set(ADVANTAGES) - OF_STEPS))
def test_padding_changes_no_advantage(kind: str) -> None:
    of, settings = inputs(), settings_of(kind)

    def wider(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.nn.functional.pad(x, (0, 4))

    mask = wider(of.loss_mask)
    assert mask is not None
    columns = {name: wider(getattr(of, name)) for name in ("token_rewards", "values", "logprobs", "teacher_logprobs")}
    padded = AdvantageInputs(of.rewards, of.group_ids, mask, reward_parts=of.reward_parts, **columns)
    assert ADVANTAGES[kind](padded, settings)[:, :-4].equal(ADVANTAGES[kind](of, settings))


@pytest.mark.parametrize("kind", sorted(CENTERED))
def test_group_of_equal_rewards_has_exactly_zero_advantage(kind: str) -> None:
    """0.1 is not representable: the mean of seven of them is off by an ulp, which over eps would look like a signal."""
    of = in_one_part(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int), torch.ones(7, 3))
    assert ADVANTAGES[kind](of, settings_of(kind)).abs().max() == 0


@pytest.mark.parametrize("kind", sorted(CENTERED))
def test_group_of_one_is_no_signal(kind: str) -> None:
    of = in_one_part(torch.tensor([3.0]), torch.tensor([0]), torch.ones(1, 2))
    assert ADVANTAGES[kind](of, settings_of(kind)).tolist() == [[0.0, 0.0]]


def test_grpo_advantage_worked_by_hand() -> None:
    # Group 0: rewards 1, 0, 0, 1: mean 1/2, deviations ±1/2, variance (4 · 1/4) / 3 = 1/3, std 0.57735,
    # so A = ±0.5 / 0.57735 = ±0.866025. Group 1: 2, 5: mean 3.5, variance (2.25 + 2.25) / 1 = 4.5, std 2.12132,
    # A = ∓1.5 / 2.12132 = ∓0.707107. (eps of 1e-6 moves the sixth digit at most.)
    rewards = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 5.0])
    groups = torch.tensor([0, 0, 1, 0, 0, 1])
    expected = torch.tensor([0.866025, -0.866025, -0.707107, -0.866025, 0.866025, 0.707107])
    found = ADVANTAGES["grpo"](AdvantageInputs(rewards, groups, torch.ones(6, 1)), settings_of("grpo"))
    torch.testing.assert_close(found, expected.unsqueeze(1), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Rewards 1, 0, 0 of one group: mean 1/3.
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3]),
        # The others' means are 0, 1/2 and 1/2.
        ("rloo", [1.0, -0.5, -0.5]),
        # log((e + 1 + 1) / 3) = log 1.572761 = 0.452832.
        ("opmd", [0.547168, -0.452832, -0.452832]),
        # Centered 2/3, -1/3, -1/3: mean 0, variance (4 + 1 + 1) / 27 = 2/9, std 0.471405.
        ("reinforce_baseline", [1.414214, -0.707107, -0.707107]),
        # A baseline of 1/3 − 0.1, so that each earns 0.1 more than its distance from the mean.
        ("asymre", [2 / 3 + 0.1, -1 / 3 + 0.1, -1 / 3 + 0.1]),
        # The batch's rewards 1, 0, 0: variance (4 + 1 + 1) / 9 / 2 = 1/3, std 0.577350.
        ("lite_ppo", [1.154701, -0.577350, -0.577350]),
        # Relative to the mean of 1/3.
        ("maxrl", [2.0, -1.0, -1.0]),
        ("reward", [1.0, 0.0, 0.0]),
        ("raft", [1.0, 0.0, 0.0]),
        # 1, 0, 0: mean 1/3, the same deviations.
        ("reinforce_pp", [1.414214, -0.707107, -0.707107]),
    ],
)
def test_advantage_worked_by_hand(kind: str, expected: list[float]) -> None:
    of = AdvantageInputs(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int), torch.ones(3, 1))
    found = ADVANTAGES[kind](of, settings_of(kind))
    torch.testing.assert_close(found, torch.tensor(expected).unsqueeze(1), rtol=0, atol=5e-6)


def test_lite_ppo_centers_by_group_and_divides_by_the_batch() -> None:
    # Groups 1, 0 and 5, 5: centered ±1/2 and 0. The batch: mean 2.75, squares 3.0625, 7.5625 and twice 5.0625,
    # variance 20.75 / 3 = 6.916667, std 2.629956: ±0.190117.
    of = AdvantageInputs(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, 1))
    found = ADVANTAGES["lite_ppo"](of, settings_of("lite_ppo"))
    torch.testing.assert_close(found.flatten(), torch.tensor([0.190117, -0.190117, 0.0, 0.0]), rtol=0, atol=1e-6)


def test_lite_ppo_divides_by_the_deviation_of_trajectories_of_all_groups() -> None:
    # Trajectories of 1, 2, 1 and 3 rows earn 1, 0 (the mean of 1 and -1), 5 and 4; the means of the groups are 1/2 and
    # 9/2. The batch: mean 5/2, squares 9/4, 25/4, 25/4 and 9/4, variance 17/3, std 2.380476. Rows would give 2.193063.
    of = AdvantageInputs(
        torch.tensor([1.0, 1.0, -1.0, 5.0, 4.0, 4.0, 4.0]),
        torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        torch.ones(7, 1),
        trajectory_ids=torch.tensor([3, 1, 1, 0, 2, 2, 2]),
    )
    found = ADVANTAGES["lite_ppo"](of, settings_of("lite_ppo"))
    expected = torch.tensor([0.5, 0.5, -1.5, 0.5, -0.5, -0.5, -0.5]) / 2.380476
    torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=2e-6)


def test_asymre_imitates_where_all_answers_are_equal() -> None:
    of = AdvantageInputs(torch.zeros(3), torch.zeros(3, dtype=torch.int), torch.ones(3, 1))
    assert ADVANTAGES["asymre"](of, settings_of("asymre", shift=-0.25)).flatten().tolist() == [0.25] * 3


def test_raft_selects_worked_by_hand() -> None:
    # Groups 0.5, 0.9, 0.9 and 0, −1: successes are those above 0, the best of them both 0.9; the second group has none.
    of = AdvantageInputs(torch.tensor([0.5, 0.9, 0.9, 0.0, -1.0]), torch.tensor([0, 0, 0, 1, 1]), torch.ones(5, 1))
    assert ADVANTAGES["raft"](of, settings_of("raft")).flatten().tolist() == [1, 1, 1, 0, 0]
    assert ADVANTAGES["raft"](of, settings_of("raft", best_only=True)).flatten().tolist() == [0, 1, 1, 0, 0]


def test_distill_worked_by_hand() -> None:
    # The model gave 0.5 and 0.8, the teacher 0.25 and 0.9: ln(1/2) = −0.693147 and ln(9/8) = 0.117783; their mean is
    # minus the estimate of the reverse KL. The third token is not trained, and the reward has no part in it.
    of = AdvantageInputs(
        torch.tensor([7.0]),
        torch.tensor([0]),
        torch.tensor([[1, 1, 0]]),
        logprobs=torch.tensor([[0.5, 0.8, 0.1]]).log(),
        teacher_logprobs=torch.tensor([[0.25, 0.9, 0.7]]).log(),
    )
    found = ADVANTAGES["distill"](of, settings_of("distill"))
    torch.testing.assert_close(found, torch.tensor([[-0.693147, 0.117783, 0.0]]), rtol=0, atol=1e-6)


def test_the_mean_of_distill_over_the_models_own_tokens_is_minus_the_reverse_kl() -> None:
    pi, teacher = torch.randn(2, 11, dtype=torch.float64).log_softmax(1)
    of = AdvantageInputs(
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([0]),
        torch.ones(1, 11),
        logprobs=pi[None],
        teacher_logprobs=teacher[None],
    )
    mean = (pi.exp() * ADVANTAGES["distill"](of, settings_of("distill"))).sum()
    torch.testing.assert_close(mean, -(pi.exp() * (pi - teacher)).sum(), rtol=FORMULA_FP64, atol=FORMULA_FP64)


@pytest.mark.parametrize(("clip", "expected"), [(None, [0.0, 4.0, 10.0, -4.0]), (5.0, [0.0, 4.0, 5.0, -4.0])])
def test_rewards_scaled_and_clipped_worked_by_hand(clip: float | None, expected: list[float]) -> None:
    # (r − 1) · 2 for 1, 3, 6 and −1, then at most 5.
    config = RewardConfig(bias=-1.0, scale=2.0, clip=clip)
    assert config.transform(torch.tensor([1.0, 3.0, 6.0, -1.0])).tolist() == expected


def test_reinforce_pp_worked_by_hand_on_several_tokens() -> None:
    # The first answer's trained tokens earn -0.5, and 0 with the reward of 1: to go from each 0.5 and 1; between them
    # stands one that is not trained. The second's one token earns -0.25 and a reward of 0.25: 0. Mean of 0.5, 1 and 0:
    # 0.5, variance (0 + 0.25 + 0.25) / 3 = 1/6, std 0.408248, so 0, 0.5 / 0.408248 = 1.224745 and -1.224745.
    of = AdvantageInputs(
        torch.tensor([1.0, 0.25]),
        torch.tensor([0, 1]),
        torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]),
        torch.tensor([[9.0, -0.5, 9.0, 0.0], [-0.25, 9.0, 9.0, 9.0]]),
    )
    found = ADVANTAGES["reinforce_pp"](of, settings_of("reinforce_pp"))
    expected = torch.tensor([[0.0, 0.0, 0.0, 1.224745], [-1.224745, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


def test_gae_worked_by_hand() -> None:
    # γ = 0.5, λ = 0.5; values 1, 2, 4; the reward 8 comes with the last token, and token 1 is not trained on.
    #   t = 2: δ = 8 − 4 = 4, A = 4. t = 0: δ = 0 + 0.5 · 4 − 1 = 1, A = 1 + 0.25 · 4 = 2.
    rewards, values = torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.tensor([[1, 0, 1]])
    assert generalized_advantages(rewards, values, mask, 0.5, 0.5).tolist() == [[2.0, 0.0, 4.0]]


def test_gae_of_a_perfect_critic_is_zero_and_without_decay_the_return_less_the_value() -> None:
    mask, rewards = torch.ones(1, 3), torch.tensor([[0.0, 0.0, 1.0]])
    assert generalized_advantages(rewards, torch.ones(1, 3), mask, 1.0, 0.95).abs().max() == 0
    values = torch.tensor([[0.25, 0.5, 0.75]])
    assert generalized_advantages(rewards, values, mask, 1.0, 1.0).equal(1 - values)


def test_overlong_penalty_worked_by_hand() -> None:
    # L_max = 20, L_cache = 4: none up to 16 tokens, −1/4 a token from there, −1 from 20 on.
    found = overlong_penalty(torch.tensor([0, 16, 17, 19, 20, 25]), 20, 4)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]


@pytest.mark.parametrize(("most", "buffer"), [(20, 4), (17, 17), (9, 1)])
def test_overlong_penalty_equals_plain_loop(most: int, buffer: int) -> None:
    found = overlong_penalty(torch.arange(2 * most), most, buffer)
    expected = [plain_penalty(length, most, buffer) for length in range(2 * most)]
    assert found.tolist() == pytest.approx(expected, rel=FORMULA_FP32)


def test_groups_with_variance_marks_every_member() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 2.0, 1.0])
    assert Groups(rewards, torch.tensor([0, 1, 1, 2, 0])).has_variance.tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # One group of three trajectories, of 1, 3 and 2 rows, that received 1, 0 and 0.5 (the mean of 0.75 and 0.25):
        # mean 1/2, deviations 1/2, -1/2, 0, variance (1/4 + 1/4) / 2 = 1/4, std 1/2.
        ("grpo", [1.0, -1.0, -1.0, -1.0, 0.5, -0.5]),
        ("dr_grpo", [0.5, -0.5, -0.5, -0.5, 0.25, -0.25]),
        # The others' means are 1/4, 3/4 and 1/2.
        ("rloo", [0.75, -0.75, -0.75, -0.75, 0.25, -0.25]),
        # log((e + 1 + e^0.5) / 3) = log 1.789001 = 0.581657.
        ("opmd", [0.418343, -0.581657, -0.581657, -0.581657, 0.168343, -0.331657]),
        # The batch is the group, so its std is 1/2 too. The std over rows would be 0.437798.
        ("lite_ppo", [1.0, -1.0, -1.0, -1.0, 0.5, -0.5]),
        # Relative to the mean of 1/2.
        ("maxrl", [1.0, -1.0, -1.0, -1.0, 0.5, -0.5]),
        # Of a single part, GRPO's over the batch's std, which is 1.
        ("gdpo", [1.0, -1.0, -1.0, -1.0, 0.5, -0.5]),
        # A baseline of 1/2 - 0.1.
        ("asymre", [0.6, -0.4, -0.4, -0.4, 0.35, -0.15]),
    ],
)
def test_group_statistics_are_per_trajectory_never_per_turn(kind: str, expected: list[float]) -> None:
    """Three answers of one trajectory, trained as three rows, weigh as much as the one answer of another."""
    rewards, rows = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.75, 0.25]), torch.tensor([7, 2, 2, 2, 9, 9])
    group, mask = torch.zeros(6, dtype=torch.int64), torch.ones(6, 1)
    of = in_one_part(rewards, group, mask)
    found = ADVANTAGES[kind](replace(of, trajectory_ids=rows), settings_of(kind))
    torch.testing.assert_close(found, torch.tensor(expected).unsqueeze(1), rtol=0, atol=5e-6)
    per_turn = ADVANTAGES[kind](of, settings_of(kind))
    assert (found - per_turn).abs().max() > 0.05  # what counting turns would come to is another number, not rounding


@pytest.mark.parametrize("kind", sorted(CENTERED))
def test_trajectories_that_earned_the_same_are_no_signal_whatever_their_rows(kind: str) -> None:
    # The mean of three rewards of 0.1 is not 0.1 in floating point.
    of = in_one_part(torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64), torch.ones(4, 1))
    parts = replace(of, trajectory_ids=torch.tensor([0, 1, 1, 1]))
    assert ADVANTAGES[kind](parts, settings_of(kind)).abs().max() == 0


def test_advantage_table_has_every_presets_and_names_the_nearest_on_a_typo() -> None:
    of = AdvantageInputs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 1))
    found = ADVANTAGES["grpo"](of, settings_of("grpo"))
    torch.testing.assert_close(found.abs(), torch.full((2, 1), 0.7071058), rtol=FORMULA_FP32, atol=FORMULA_FP32)
    assert {preset["advantage"]["kind"] for preset in PRESETS.values()} <= set(ADVANTAGES)
    with pytest.raises(ConfigError, match="unknown advantage 'gpro', did you mean 'grpo'"):
        ADVANTAGES["gpro"]
