"""Steps of trajectories, and the advantages that compare them: hand-worked numbers and plain loops."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageInputs
from archon.rl.algorithms.steps import Step, split_steps
from tests.tolerances import FORMULA_FP64


def test_steps_are_answers_with_what_was_observed_before_each() -> None:
    # Group 0: prompt 5 6, answer 1 2, observed 7, answer 3; the same prompt, answer 9, observed 7, answer 9 9 of two
    # turns without anything between; then padding. Group 1: the same prompt in another group is another state.
    ids = torch.tensor([[5, 6, 1, 2, 7, 3, 0], [5, 6, 9, 7, 9, 9, 0], [5, 6, 4, 0, 0, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0]])
    turns = torch.tensor([[-1, -1, 0, 0, -1, 1, -1], [-1, -1, 0, -1, 1, 2, -1], [-1, -1, 0, -1, -1, -1, -1]])
    attended = torch.tensor([[1] * 6 + [0], [1] * 6 + [0], [1] * 3 + [0] * 4]).bool()
    groups = torch.tensor([0, 0, 1])
    expected = (
        *(Step(0, (2, 3), 0), Step(0, (5,), 1)),
        *(Step(1, (2,), 0), Step(1, (4,), 1), Step(1, (5,), 2)),
        Step(2, (2,), 3),
    )
    assert split_steps(ids, attended, mask, groups, turns) == expected
    merged = split_steps(ids, attended, mask, groups)
    assert merged[3] == Step(1, (4, 5), 1) and len(merged) == 5


def test_gigpo_worked_by_hand() -> None:
    # Two runs of two steps of one token each, γ = 0.5, ω = 2, not normalized. Rewards 1 and 0: mean 1/2, A_run = ±1/2.
    # Returns: 0.5, 1 | 0, 0. The first steps share a state: mean 0.25, ±0.25. The second ones do not: 0.
    of = AdvantageInputs(
        torch.tensor([1.0, 0.0]),
        torch.tensor([0, 0]),
        torch.ones(2, 2),
        steps=(Step(0, (0,), 0), Step(0, (1,), 1), Step(1, (0,), 0), Step(1, (1,), 2)),
    )
    settings = ADVANTAGES.parse({"kind": "gigpo", "gamma": 0.5, "step_weight": 2.0, "normalize": False})
    assert ADVANTAGES["gigpo"](of, settings).tolist() == [[0.5 + 0.5, 0.5], [-0.5 - 0.5, -0.5]]
    # Normalized: rewards 1, 0 and returns 0.5, 0 both have deviations of half their distance over 0.707107 of it.
    settings = ADVANTAGES.parse({"kind": "gigpo", "gamma": 0.5})
    expected = torch.tensor([[1.414214, 0.707107], [-1.414214, -0.707107]])
    torch.testing.assert_close(ADVANTAGES["gigpo"](of, settings), expected, rtol=0, atol=6e-6)


def test_gigpo_counts_what_each_step_earned_and_takes_rows_of_a_run_as_returns() -> None:
    # One row, steps that earn 1 and 2 + 4 (the row's reward): returns 1 + 0.5 · 6 = 4 and 6. Both in one state: mean 5.
    # A group of one run: A_run = 0.
    one = AdvantageInputs(
        torch.tensor([4.0]),
        torch.tensor([0]),
        torch.ones(1, 2),
        torch.tensor([[1.0, 2.0]]),
        steps=(Step(0, (0,), 0), Step(0, (1,), 0)),
    )
    settings = ADVANTAGES.parse({"kind": "gigpo", "gamma": 0.5, "normalize": False})
    assert ADVANTAGES["gigpo"](one, settings).tolist() == [[-1.0, 1.0]]
    # As two rows of one run with rewards 4 and 6, which are returns: nothing is discounted again.
    two = AdvantageInputs(
        torch.tensor([4.0, 6.0]),
        torch.tensor([0, 0]),
        torch.ones(2, 1),
        trajectory_ids=torch.tensor([3, 3]),
        steps=(Step(0, (0,), 0), Step(1, (0,), 0)),
    )
    assert ADVANTAGES["gigpo"](two, settings).tolist() == [[-1.0], [1.0]]


def runs() -> AdvantageInputs:
    """Of three groups with uneven runs, whose steps answer few states; float64."""
    generator = torch.Generator().manual_seed(1)
    n, width = 12, 10
    groups = torch.arange(n) % 3
    ids = torch.randint(0, 2, (n, width), generator=generator)
    mask = torch.randint(0, 2, (n, width), generator=generator)
    mask[:, 0], mask[:, 5] = 0, 1
    return AdvantageInputs(
        torch.randint(0, 3, (n,), generator=generator).double(),
        groups,
        mask,
        torch.randn(n, width, generator=generator, dtype=torch.float64) * 0.1,
        steps=split_steps(ids, torch.ones_like(ids).bool(), mask, groups),
    )


def standard(values: list[float], x: float, eps: float) -> float:
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return (x - statistics.fmean(values)) / (std + eps) if max(values) > min(values) else 0.0


def test_gigpo_equals_plain_loop() -> None:
    of, gamma, weight, eps = runs(), 0.9, 0.7, 1e-3
    assert of.token_rewards is not None
    settings = ADVANTAGES.parse({"kind": "gigpo", "gamma": gamma, "step_weight": weight, "eps": eps})
    found = ADVANTAGES["gigpo"](of, settings)
    earned = {}
    for step in of.steps:
        last = not any(other.row == step.row and other.tokens > step.tokens for other in of.steps)
        own = sum(of.token_rewards[step.row, t].item() for t in step.tokens)
        earned[step] = own + (of.rewards[step.row].item() if last else 0.0)
    returns = {}
    for step in of.steps:
        later = [s for s in of.steps if s.row == step.row and s.tokens >= step.tokens]
        returns[step] = sum(gamma**k * earned[s] for k, s in enumerate(later))
    shared = 0
    for step in of.steps:
        members = [of.totals[i].item() for i in range(12) if of.group_ids[i] == of.group_ids[step.row]]
        same = [returns[s] for s in of.steps if s.state == step.state]
        shared += len(same) > 1
        expected = standard(members, of.totals[step.row].item(), eps) + weight * standard(same, returns[step], eps)
        for token in step.tokens:
            assert found[step.row, token].item() == pytest.approx(expected, rel=FORMULA_FP64)
    assert shared > 5
    assert found[of.loss_mask == 0].abs().max() == 0


def test_step_wise_grpo_worked_by_hand() -> None:
    # Run 7 is two rows with rewards 9 and 1, of which the last one counts; run 2 has one row with 0. Rewards 1 and 0 of
    # one group: ±0.5 / 0.707107. With per_step the first is shared by two rows.
    of = AdvantageInputs(
        torch.tensor([9.0, 0.0, 1.0]),
        torch.zeros(3, dtype=torch.int64),
        torch.ones(3, 1),
        trajectory_ids=torch.tensor([7, 2, 7]),
        steps=(Step(0, (0,), 0), Step(1, (0,), 0), Step(2, (0,), 1)),
    )
    found = ADVANTAGES["step_wise_grpo"](of, ADVANTAGES.parse("step_wise_grpo")).flatten()
    torch.testing.assert_close(found, torch.tensor([0.707106, -0.707106, 0.707106]), rtol=0, atol=2e-6)
    shared = ADVANTAGES.parse({"kind": "step_wise_grpo", "per_step": True})
    divided = ADVANTAGES["step_wise_grpo"](of, shared).flatten()
    assert (divided * torch.tensor([2.0, 1.0, 2.0])).tolist() == pytest.approx(found.tolist())


@pytest.mark.parametrize("per_step", [False, True])
def test_step_wise_grpo_equals_plain_loop(per_step: bool) -> None:
    of = replace(runs(), trajectory_ids=torch.tensor([0, 1, 2, 0, 4, 5, 0, 4, 5, 9, 10, 11]))
    settings = ADVANTAGES.parse({"kind": "step_wise_grpo", "eps": 1e-3, "per_step": per_step})
    found = ADVANTAGES["step_wise_grpo"](of, settings)
    assert of.trajectory_ids is not None
    ids, totals, groups = of.trajectory_ids.tolist(), of.totals.tolist(), of.group_ids.tolist()
    outcome = {run: totals[max(i for i in range(12) if ids[i] == run)] for run in ids}
    for row in range(12):
        members = [outcome[run] for run in dict.fromkeys(ids[i] for i in range(12) if groups[i] == groups[row])]
        expected = standard(members, outcome[ids[row]], 1e-3)
        if per_step:
            expected /= sum(ids[step.row] == ids[row] for step in of.steps)
        trained = found[row][of.loss_mask[row] == 1]
        assert trained.tolist() == pytest.approx([expected] * len(trained), rel=FORMULA_FP64)
