"""Advantages of trajectories of several steps: of whole runs, and of single steps taken in the same state."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    Groups,
    NormalizedGroupSettings,
    normalized_rows,
)


class StepWiseSettings(NormalizedGroupSettings):
    """The settings of advantage `step_wise_grpo`."""

    needs_steps = True
    per_step: bool = Field(False, description="divide a run's advantage by the number of its steps")


@ADVANTAGES.register("step_wise_grpo")
def step_wise_grpo(inputs: AdvantageInputs, settings: StepWiseSettings) -> Tensor:
    """(r_last − mean_group) / (std_group + eps) on every step of a run, whose reward r_last is that of its last row.

    GRPO for runs that are trained step by step (rLLM, Tan et al. 2025; `step_wise_grpo` of Trinity-RFT, arXiv
    2505.17826): the runs of a group are compared by their outcomes, and an earlier step shares its run's advantage.
    Rewards of earlier rows do not count. The standard deviation is unbiased (n − 1).
    """
    own = inputs.groups  # only for the trajectory of each row
    rows = torch.arange(len(own.trajectory_index), device=own.trajectory_index.device)
    last = torch.zeros_like(rows).scatter_reduce(0, own.trajectory_index, rows, "amax")
    outcomes = Groups(inputs.totals[last[own.trajectory_index]], inputs.group_ids, inputs.trajectory_ids)
    advantages = normalized_rows(outcomes, settings.eps)
    if settings.per_step:
        counts = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        of_step = own.trajectory_index[[step.row for step in inputs.steps]]
        advantages = advantages / counts.index_add(0, of_step, torch.ones_like(counts[of_step]))[own.trajectory_index]
    return inputs.broadcast_to_tokens(advantages)


class GiGPOSettings(NormalizedGroupSettings):
    """The settings of advantage `gigpo`, with its paper's weight and discount."""

    needs_steps = True
    step_weight: float = Field(1.0, ge=0, description="weight of the step's advantage next to the run's")
    gamma: float = Field(0.95, gt=0, le=1, description="discount, a step")
    normalize: bool = Field(True, description="divide by the standard deviation of the runs, and of the steps")


@ADVANTAGES.register("gigpo")
def gigpo(inputs: AdvantageInputs, settings: GiGPOSettings) -> Tensor:
    """A_run + ω · A_step (GiGPO, arXiv 2505.10978, equations 3 to 8).

    A_run compares the runs of a group, (r − mean) / F. A_step compares the steps of a group that were taken in the same
    state, (R_t − mean) / F, by their discounted returns R_t = Σ_k γ^(k − t) r_k; a state is what was observed before
    the step, and a step in a state of its own has 0. F is the standard deviation (n − 1) plus eps, or 1.

    r_k is what the tokens of step k earned; a row's own reward comes with its last token. Where a run is trained as
    several rows, a row's reward is its return already.
    """
    earned, steps = inputs.token_totals.double(), inputs.steps
    returns = torch.zeros(len(steps), dtype=torch.float64)
    for i in range(len(steps) - 1, -1, -1):
        returns[i] = earned[steps[i].row, list(steps[i].tokens)].sum()
        if i + 1 < len(steps) and steps[i + 1].row == steps[i].row:
            returns[i] += settings.gamma * returns[i + 1]
    states = Groups(returns, torch.tensor([step.state for step in steps], dtype=torch.int64))
    runs = inputs.groups
    if settings.normalize:
        of_run, of_step = normalized_rows(runs, settings.eps), normalized_rows(states, settings.eps)
    else:
        of_run, of_step = runs.subtract_baseline(runs.mean), states.subtract_baseline(states.mean)
    advantages = inputs.broadcast_to_tokens(of_run)
    for step, advantage in zip(steps, of_step.tolist(), strict=True):
        advantages[step.row, list(step.tokens)] += settings.step_weight * advantage
    return advantages
