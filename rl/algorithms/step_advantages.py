"""Advantages of multi-step trajectories: whole runs, and single steps taken in the same state."""

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
    """Settings of advantage `step_wise_grpo`."""

    needs_steps = True
    per_step: bool = Field(False, description="divide a run's advantage by the number of its steps")


@ADVANTAGES.register("step_wise_grpo")
def step_wise_grpo(inputs: AdvantageInputs, settings: StepWiseSettings) -> Tensor:
    """Step-wise GRPO: (r_last − mean_group) / (std_group + eps) on every step of a run.

    r_last is the reward of the run's last row; rewards of earlier rows do not count. The standard deviation is
    unbiased (n − 1). Sources: rLLM (Tan et al. 2025); `step_wise_grpo` of Trinity-RFT (arXiv 2505.17826).
    """
    index = inputs.groups.trajectory_index
    rows = torch.arange(len(index), device=index.device)
    last = torch.zeros_like(rows).scatter_reduce(0, index, rows, "amax")
    outcomes = Groups(inputs.totals[last[index]], inputs.group_ids, inputs.trajectory_ids)
    advantages = normalized_rows(outcomes, settings.eps)
    if settings.per_step:
        counts = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        of_step = index[[step.row for step in inputs.steps]]
        advantages = advantages / counts.index_add(0, of_step, torch.ones_like(counts[of_step]))[index]
    return inputs.broadcast_to_tokens(advantages)


class GiGPOSettings(NormalizedGroupSettings):
    """Settings of advantage `gigpo`, with the paper's weight and discount."""

    needs_steps = True
    step_weight: float = Field(1.0, ge=0, description="weight of the step advantage; the run advantage has 1")
    gamma: float = Field(0.95, gt=0, le=1, description="discount per step")
    normalize: bool = Field(True, description="divide by the standard deviations of runs and steps")


@ADVANTAGES.register("gigpo")
def gigpo(inputs: AdvantageInputs, settings: GiGPOSettings) -> Tensor:
    """GiGPO: A_run + ω · A_step (arXiv 2505.10978, equations 3 to 8).

    A_run = (r − mean) / F over the runs of a group. A_step = (R_t − mean) / F over the group's steps taken in the same
    state, with discounted returns R_t = Σ_k γ^(k − t) r_k. A state is the observation before the step; a step with a
    unique state gets 0. F is the standard deviation (n − 1) plus eps, or 1.

    r_k is the reward of the tokens of step k; the last token gets the row's reward. If a run is trained as several
    rows, the reward of a row is already its return.
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
