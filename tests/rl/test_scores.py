"""pass@k, means and intervals: hand-worked numbers, plain loops, and how often an interval holds the truth."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from archon.rl.scores import estimate, pass_at_k, proportion, summarize
from tests.tolerances import FORMULA_FP64


def test_pass_at_k_worked_by_hand() -> None:
    # 2 of 5 are right: pass@1 = 2/5; of the 10 pairs 3 hold two of the 3 wrong ones: 7/10; of 4 one is always right.
    assert [pass_at_k(5, 2, k) for k in (1, 2, 3, 4, 5)] == pytest.approx([0.4, 0.7, 0.9, 1.0, 1.0])
    assert pass_at_k(8, 0, 3) == 0 and pass_at_k(8, 8, 1) == 1
    with pytest.raises(ValueError, match="pass@3 needs at least 3 answers, got 2"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(n: int) -> None:
    for correct in range(n + 1):
        right = [i < correct for i in range(n)]
        for k in range(1, n + 1):
            found = [any(chosen) for chosen in combinations(right, k)]
            assert pass_at_k(n, correct, k) == pytest.approx(sum(found) / len(found), rel=FORMULA_FP64)


def test_intervals_worked_by_hand() -> None:
    # 0, 1, 1, 0: mean 1/2, variance 1/3, standard error (1/12)^0.5 = 0.288675, times 1.959964: 0.565793.
    found = estimate([0.0, 1.0, 1.0, 0.0])
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, -0.065793, 1.065793), abs=1e-6)
    # Wilson: z² = 3.841459, center (0.5 + 3.841459/8) / (1 + 3.841459/4) = 0.5, reach 1.959964 / 1.960365 ·
    # (0.0625 + 3.841459/64)^0.5 = 0.349961.
    found = proportion([0.0, 1.0, 1.0, 0.0])
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.150039, 0.849961), abs=1e-6)
    # No success in ten: the upper bound is z² / (n + z²).
    found = proportion([0.0] * 10)
    assert (found.low, found.high) == pytest.approx((0.0, 3.841459 / 13.841459), abs=1e-6)
    assert math.isnan(estimate([0.3]).low)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """500 evaluations of 60 prompts, whose chance of a right answer is 0.1 to 0.9, and 0.5 on average."""
    generator = torch.Generator().manual_seed(0)
    held = {"normal": 0, "wilson": 0}
    for _ in range(500):
        chances = torch.rand(60, generator=generator) * 0.8 + 0.1
        right = (torch.rand(60, 4, generator=generator) < chances.unsqueeze(1)).double().mean(1).tolist()
        for name, interval in (("normal", estimate(right)), ("wilson", proportion(right))):
            held[name] += interval.low <= 0.5 <= interval.high
    assert 460 <= held["normal"] <= 490
    assert held["wilson"] > held["normal"]


def test_a_prompt_counts_once_and_lost_answers_not_at_all() -> None:
    # Means 1/2 and 1; the third has no answer. pass@2 of the first: both pairs of 1 of 2 hold the right one: 1; the
    # second has one answer only.
    found = summarize([[1.0, 0.0], [1.0], []], [1, 2], pass_threshold=1.0)
    assert (found["reward"].mean, found["reward"].prompts) == (0.75, 2)
    assert (found["pass@1"].mean, found["pass@2"].mean, found["pass@2"].prompts) == (0.75, 1.0, 1)
    assert summarize([[0.4]], [1], pass_threshold=0.3)["pass@1"].mean == 1
