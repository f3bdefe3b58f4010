"""Further advantages of whole answers: fixed, shifted and batch-normalized baselines, and the selection of answers."""

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
    """r itself (REINFORCE, Williams 1992); `algorithm.rewards.bias` is a fixed baseline."""
    return inputs.broadcast_to_tokens(inputs.totals)


class ShiftedBaseline(GroupSettings):
    """The settings of advantage `asymre`, with the shift of its paper's experiments on language models."""

    shift: float = Field(-0.1, description="added to the group's mean; negative: successes weigh more than failures")


@ADVANTAGES.register("asymre")
def asymre(inputs: AdvantageInputs, settings: ShiftedBaseline) -> Tensor:
    """r − (mean_group + shift) (AsymRE, arXiv 2506.20520: a baseline below the mean reward of the sampling policy).

    Answers of a group with equal rewards get −shift, so they are imitated; those of a group of one get it too.
    """
    groups = inputs.groups
    return inputs.broadcast_to_tokens(groups.subtract_baseline(groups.mean) - settings.shift)


@ADVANTAGES.register("lite_ppo")
def lite_ppo(inputs: AdvantageInputs, settings: NormalizedGroupSettings) -> Tensor:
    """(r − mean_group) / (std_batch + eps) (Lite PPO, arXiv 2508.08221: mean of the group, deviation of the batch).

    std_batch is that of the rewards of all trajectories, about their common mean, unbiased (n − 1); 0 where it is 0.
    """
    groups = inputs.groups
    std = groups.rewards.std() if len(groups.rewards) > 1 else torch.zeros(())
    return inputs.broadcast_to_tokens(groups.subtract_baseline(groups.mean) / (std + settings.eps))


class Selection(AdvantageSettings):
    """The settings of advantage `raft`."""

    best_only: bool = Field(False, description="of the successes of a group keep those with its highest reward")


@ADVANTAGES.register("raft")
def raft(inputs: AdvantageInputs, settings: Selection) -> Tensor:
    """1 for the answers that are kept, 0 for the others.

    Kept are all successes, with r > 0 (rejection sampling as in arXiv 2504.11343, section 3), or, with `best_only`,
    those of them that are the best of their group (RAFT, arXiv 2304.06767, algorithm 1).
    """
    totals = inputs.totals
    kept = totals > 0
    if settings.best_only:
        groups = inputs.groups
        kept &= totals.double() == groups.max(groups.rewards)[groups.trajectory_index]
    return inputs.broadcast_to_tokens(kept.to(totals.dtype))
