"""Advantages from rewards. Group statistics are per trajectory, never per turn or token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from archon.rl.algorithms.registry import Registry

if TYPE_CHECKING:
    from archon.rl.config import AlgorithmConfig

# (rewards [B], group_ids [B], configuration) -> advantages [B], one number a trajectory
AdvantageFn = Callable[[Tensor, Tensor, "AlgorithmConfig"], Tensor]
ADVANTAGES: Registry[AdvantageFn] = Registry("advantage")


def groups_with_spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Bool [B]: does the trajectory's group hold at least two different rewards, i.e. is there anything to learn?"""
    n_groups = int(group_ids.max()) + 1 if group_ids.numel() else 0
    index = group_ids.long()
    highest = rewards.new_full((n_groups,), -torch.inf).scatter_reduce(0, index, rewards, "amax")
    lowest = rewards.new_full((n_groups,), torch.inf).scatter_reduce(0, index, rewards, "amin")
    return (highest > lowest)[index]


def group_normalized_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """(r − mean_group) / (std_group + eps) for each trajectory (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The paper leaves the estimator of the standard deviation open; this is the unbiased one (n − 1), as in the public
    implementations. Computed in float64, and exactly 0 for a group of equal rewards, where the rounding of the mean
    divided by `eps` would otherwise pass for a signal.

    Args:
        rewards: float [B].
        group_ids: int [B], 0 ≤ id; trajectories with the same id answer the same prompt. Groups may differ in size.
        eps: added to the standard deviation.

    Returns:
        Advantages [B] in the dtype of `rewards`.
    """
    index, r = group_ids.long(), rewards.double()
    n_groups = int(index.max()) + 1 if index.numel() else 0

    def sum_by_group(values: Tensor) -> Tensor:
        return values.new_zeros(n_groups).index_add(0, index, values)

    count = sum_by_group(torch.ones_like(r))
    centred = r - (sum_by_group(r) / count)[index]
    std = (sum_by_group(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    advantages = centred / (std[index] + eps)
    return torch.where(groups_with_spread(rewards, group_ids), advantages, 0.0).to(rewards.dtype)


@ADVANTAGES.register("grpo")
def _grpo(rewards: Tensor, group_ids: Tensor, config: AlgorithmConfig) -> Tensor:
    return group_normalized_advantages(rewards, group_ids, config.advantage_eps)
