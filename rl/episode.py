"""One prompt's episode: its context, and the trajectories or the error that it ended with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from archon.rl.algorithms.advantages import Groups
from archon.rl.algorithms.config import ZeroVarianceGroups
from archon.rl.episode_context import EpisodeContext
from archon.rl.prompts import Prompt


@dataclass
class Episode:
    """What became of one prompt: a group of trajectories, or nothing (rejected, or `error`)."""

    prompt: Prompt
    context: EpisodeContext
    trajectories: dict[str, Any] | None = field(default=None, repr=False)
    error: BaseException | None = None

    @property
    def rewards(self) -> Tensor:
        """Float64 [T]: the reward of each trajectory of the group, one of several rows counted once."""
        if not self.trajectories:
            return torch.empty(0, dtype=torch.float64)
        rewards = self.trajectories["rewards"]
        one_group = torch.zeros(len(rewards), dtype=torch.int64)
        return Groups(rewards, one_group, self.trajectories.get("trajectory_ids")).rewards

    @property
    def zero_variance(self) -> bool:
        """Whether all trajectories of the group have one reward, so that there is nothing to learn."""
        rewards = self.rewards
        return not (len(rewards) > 0 and bool(rewards.max() > rewards.min()))

    def is_trainable(self, zero_variance_groups: ZeroVarianceGroups) -> bool:
        """Whether the group has something to train on."""
        return bool(self.trajectories) and (zero_variance_groups == "keep" or not self.zero_variance)
