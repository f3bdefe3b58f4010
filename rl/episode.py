"""`Episode`: one run of a workflow on a prompt, and its result."""

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
    """An episode and its result: a group of trajectories, or None where it was rejected or raised `error`."""

    prompt: Prompt
    context: EpisodeContext
    trajectories: dict[str, Any] | None = field(default=None, repr=False)
    error: BaseException | None = None

    @property
    def rewards(self) -> Tensor:
        """The rewards of the group's T trajectories, float64 [T]."""
        if not self.trajectories:
            return torch.empty(0, dtype=torch.float64)
        rewards = self.trajectories["rewards"]
        one_group = torch.zeros(len(rewards), dtype=torch.int64)
        return Groups(rewards, one_group, self.trajectories.get("trajectory_ids")).rewards

    @property
    def zero_variance(self) -> bool:
        """Whether all trajectories of the group have the same reward."""
        rewards = self.rewards
        return not (len(rewards) > 0 and bool(rewards.max() > rewards.min()))

    def is_trainable(self, zero_variance_groups: ZeroVarianceGroups) -> bool:
        """Whether the group is part of the training batch."""
        return bool(self.trajectories) and (zero_variance_groups == "keep" or not self.zero_variance)
