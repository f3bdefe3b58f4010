"""One prompt's episode: its context, and the trajectories or the error that it ended with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from archon.rl.algorithms.advantages import Groups
from archon.rl.context import EpisodeContext
from archon.rl.prompts import Prompt

if TYPE_CHECKING:
    pass


@dataclass
class Episode:
    """What became of one prompt: a group of trajectories, or nothing (rejected, or `error`)."""

    prompt: Prompt
    context: EpisodeContext
    trajectories: dict[str, Any] | None = field(default=None, repr=False)
    error: BaseException | None = None

    @property
    def earned(self) -> Tensor:
        """Float64 [T]: the reward of each trajectory of the group, one of several rows counted once."""
        if not self.trajectories:
            return torch.empty(0, dtype=torch.float64)
        rewards = self.trajectories["rewards"]
        one_group = torch.zeros(len(rewards), dtype=torch.int64)
        return Groups(rewards, one_group, self.trajectories.get("trajectory_ids")).rewards

    @property
    def has_spread(self) -> bool:
        """Whether two trajectories of the group differ in reward, without which there is nothing to learn."""
        earned = self.earned
        return len(earned) > 0 and bool(earned.max() > earned.min())
