"""Advantages with fixed, shifted and batch-normalized baselines, and answer selection."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageSettings,
    GroupSettings,
    NormalizedGroupSettings,
)


@ADVANTAGES.register("reward")
def reward(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    """REINFORCE: the reward r (Williams 1992); `algorithm.rewards.bias` is a fixed baseline."""
    return inputs.broadcast_to_tokens(inputs.totals)


class ShiftedBaseline(GroupSettings):
    """Settings of advantage `asymre`, with the shift of the paper's language-model experiments."""

    shift: float = Field(-0.1, description="added to the group's mean; negative: successes weigh more than failures")


@ADVANTAGES.register("asymre")
def asymre(inputs: AdvantageInputs, settings: ShiftedBaseline) -> Tensor:
    """AsymRE: r − (mean_group + shift), a baseline below the mean reward (arXiv 2506.20520).

    Answers of a group with equal rewards, and the answer of a group of one, get −shift: they are imitated.
    """
    groups = inputs.groups
    return inputs.broadcast_to_tokens(groups.subtract_baseline(groups.mean) - settings.shift)


@ADVANTAGES.register("lite_ppo")
def lite_ppo(inputs: AdvantageInputs, settings: NormalizedGroupSettings) -> Tensor:
    """Lite PPO: (r − mean_group) / (std_batch + eps) (arXiv 2508.08221).

    std_batch is the unbiased standard deviation (n − 1) of all trajectory rewards.
    """
    groups = inputs.groups
    std = groups.rewards.std() if len(groups.rewards) > 1 else torch.zeros(())
    return inputs.broadcast_to_tokens(groups.subtract_baseline(groups.mean) / (std + settings.eps))


@ADVANTAGES.register("maxrl")
def maxrl(inputs: AdvantageInputs, settings: GroupSettings) -> Tensor:
    """MaxRL: (r − mean_group) / mean_group, for rewards of 0 and 1 (maximum likelihood RL, arXiv 2602.02710).

    Rare successes count more than with the standard deviation of GRPO. A group whose mean is not above 0 is no signal.
    """
    groups = inputs.groups
    succeeds = (groups.mean > 0)[groups.trajectory_index]
    relative = groups.subtract_baseline(groups.mean) / groups.mean[groups.trajectory_index]
    return inputs.broadcast_to_tokens(torch.where(succeeds, relative, 0.0))


class Selection(AdvantageSettings):
    """Settings of advantage `raft`."""

    best_only: bool = Field(False, description="keep only the successes with the group's highest reward")


@ADVANTAGES.register("raft")
def raft(inputs: AdvantageInputs, settings: Selection) -> Tensor:
    """RAFT: 1 for kept answers, else 0.

    Successes (r > 0) are kept (rejection sampling, arXiv 2504.11343, section 3). With `best_only`, only the best
    successes of each group are kept (RAFT, arXiv 2304.06767, algorithm 1).
    """
    totals = inputs.totals
    kept = totals > 0
    if settings.best_only:
        groups = inputs.groups
        kept &= totals.double() == groups.max(groups.rewards)[groups.trajectory_index]
    return inputs.broadcast_to_tokens(kept.to(totals.dtype))
