"""Advantages from rewards. Group statistics are per trajectory, never per turn or token: one that is trained as several
rows, one an answer, counts once, with the mean of their rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.registry import MethodRegistry, MethodSettings


@dataclass(frozen=True)
class AdvantageInputs:
    """Rewards and values of a batch. Tokens that are not trained on have neither.

    Args:
        rewards: float [B], of whole rows.
        group_ids: int [B], 0 ≤ id; rows with the same id answer the same prompt. Groups may differ in size.
        loss_mask: [B, S], 1 at trained tokens.
        token_rewards: float [B, S], of single tokens besides, such as a KL penalty; None: nothing.
        values: float [B, S], the critic's estimate of what is still to come before each token; None: no critic.
        trajectory_ids: int [B]; rows with the same id, of one group, are parts of one trajectory. None: no two are.
    """

    rewards: Tensor
    group_ids: Tensor
    loss_mask: Tensor
    token_rewards: Tensor | None = None
    values: Tensor | None = None
    trajectory_ids: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """Float [B]: the sum of a row's rewards."""
        if self.token_rewards is None:
            return self.rewards
        return self.rewards + (self.token_rewards * self.loss_mask).sum(1).to(self.rewards.dtype)

    def on_tokens(self, advantages: Tensor) -> Tensor:
        """Returns one number a row [B] on each of its trained tokens [B, S]."""
        return advantages.unsqueeze(1) * self.loss_mask


class AdvantageSettings(MethodSettings):
    """The settings of an advantage.

    Attributes:
        compares_group: whether it compares the answers to one prompt, so that a group needs two.
        needs_critic: whether it reads `AdvantageInputs.values`.
    """

    compares_group: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False


# (rewards and values, settings) -> advantages [B, S], 0 where no token is trained
AdvantageFn = Callable[[AdvantageInputs, Any], Tensor]
ADVANTAGES: MethodRegistry[AdvantageFn] = MethodRegistry("advantage", AdvantageSettings)


class Groups:
    """Rows by trajectory, and trajectories by group.

    Args:
        rewards: float [B], of rows.
        group_ids: int [B].
        trajectory_ids: int [B], or None, as `AdvantageInputs` has them.

    Attributes:
        row_rewards: float64 [B].
        rewards: float64 [T], of trajectories: the mean over its rows, exactly their reward where they have the same.
        count: float64 [T], trajectories in the group of each.
        mean: float64 [T], over that group.
        has_variance: bool [T]: does the group hold two trajectories with different rewards? Else there is nothing to
            learn.
        of_row: int64 [B], the trajectory of each row.
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor | None = None) -> None:
        self.row_rewards = rewards.double()
        ids = torch.arange(len(rewards)) if trajectory_ids is None else trajectory_ids
        self.of_row = ids.to(rewards.device).unique(return_inverse=True)[1]
        low, high, mean = (_over(self.of_row, self.row_rewards, reduce) for reduce in ("amin", "amax", "mean"))
        self.rewards = torch.where(low == high, low, mean)
        self._group = _over(self.of_row, group_ids.long(), "amax")
        self.count = self.sum(torch.ones_like(self.rewards))
        self.mean = self.sum(self.rewards) / self.count
        self.has_variance = self.highest(self.rewards) > -self.highest(-self.rewards)

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over the group of each trajectory, [T]."""
        return _over(self._group, values, "sum")[self._group]

    def highest(self, values: Tensor) -> Tensor:
        """Returns the highest in the group of each trajectory, [T]."""
        return _over(self._group, values, "amax")[self._group]

    def minus_baseline(self, baseline: Tensor) -> Tensor:
        """Returns each row's reward less its trajectory's `baseline` [T], float64 [B]; exactly 0 without variance,
        where rounding would otherwise pass for a signal."""
        return torch.where(self.has_variance[self.of_row], self.row_rewards - baseline[self.of_row], 0.0)


def _over(index: Tensor, values: Tensor, reduce: str) -> Tensor:
    """Returns `sum`, `mean`, `amax` or `amin` of the values with each index, from 0 to the highest."""
    size = int(index.max()) + 1 if index.numel() else 0
    return values.new_zeros(size).scatter_reduce(0, index, values, reduce, include_self=False)


def group_normalized_advantages(
    rewards: Tensor, group_ids: Tensor, eps: float = 1e-6, trajectory_ids: Tensor | None = None
) -> Tensor:
    """(r − mean_group) / (std_group + eps) (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The paper leaves the estimator of the standard deviation open; this is the unbiased one (n − 1), as in the public
    implementations. Computed in float64.

    Args:
        rewards: float [B].
        group_ids: int [B].
        eps: added to the standard deviation.
        trajectory_ids: as `AdvantageInputs` has them.

    Returns:
        Advantages [B] in the dtype of `rewards`.
    """
    groups = Groups(rewards, group_ids, trajectory_ids)
    centered = torch.where(groups.has_variance, groups.rewards - groups.mean, 0.0)
    std = (groups.sum(centered.square()) / (groups.count - 1).clamp(min=1)).sqrt()
    return (groups.minus_baseline(groups.mean) / (std + eps)[groups.of_row]).to(rewards.dtype)


def group_centered_advantages(rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor | None = None) -> Tensor:
    """r − mean_group, not divided by a standard deviation (Dr. GRPO, arXiv 2503.20783, section 3.2), [B]."""
    groups = Groups(rewards, group_ids, trajectory_ids)
    return groups.minus_baseline(groups.mean).to(rewards.dtype)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor | None = None) -> Tensor:
    """r − the mean of the group's other trajectories (RLOO, arXiv 2402.14740, section 3.3), [B]; 0 for one alone."""
    groups = Groups(rewards, group_ids, trajectory_ids)
    others = (groups.mean * groups.count - groups.rewards) / (groups.count - 1).clamp(min=1)
    return groups.minus_baseline(others).to(rewards.dtype)


def mirror_descent_advantages(
    rewards: Tensor, group_ids: Tensor, tau: float, trajectory_ids: Tensor | None = None
) -> Tensor:
    """r − τ log mean_group exp(r / τ), [B]: the reward less the group's estimate of the log-partition function of
    policy mirror descent (Kimi k1.5, arXiv 2501.12599, section 2.3.2)."""
    groups = Groups(rewards, group_ids, trajectory_ids)
    highest = groups.highest(groups.rewards)
    mean = groups.sum(((groups.rewards - highest) / tau).exp()) / groups.count
    return groups.minus_baseline(highest + tau * mean.log()).to(rewards.dtype)


def batch_normalized(advantages: Tensor, loss_mask: Tensor, eps: float) -> Tensor:
    """(A − mean) / (std + eps) over all trained tokens of the batch, [B, S]; the standard deviation is the batch's own
    (n). All zeros where the tokens do not differ."""
    trained = loss_mask > 0
    values = advantages[trained].double()
    if values.numel() == 0 or bool(values.max() == values.min()):
        return torch.zeros_like(advantages)
    normal = (advantages.double() - values.mean()) / (values.std(correction=0) + eps)
    return torch.where(trained, normal, 0.0).to(advantages.dtype)


def generalized_advantages(
    token_rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1} (GAE, arXiv 1506.02438, equations 11 to 16), [B, S].

    t runs over the trained tokens alone: what stands between two turns is no action. After the last one V is 0.

    Args:
        token_rewards, values: float [B, S]; `values[:, t]` is the estimate before token t.
        loss_mask: [B, S].
    """
    advantages = torch.zeros_like(values)
    following = values.new_zeros(len(values))
    running = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        trained = loss_mask[:, t] > 0
        delta = token_rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(trained, delta + gamma * lam * running, running)
        following = torch.where(trained, values[:, t], following)
        advantages[:, t] = torch.where(trained, running, 0.0)
    return advantages


def rewards_of_tokens(inputs: AdvantageInputs) -> Tensor:
    """Returns the reward of each token, float [B, S], the trajectory's own with its last trained token."""
    trained = inputs.loss_mask > 0
    place = torch.arange(trained.shape[1], device=trained.device)
    last = place == torch.where(trained, place, -1).amax(1, keepdim=True)
    rewards = torch.where(last, inputs.rewards.unsqueeze(1), 0.0)
    return rewards if inputs.token_rewards is None else rewards + inputs.token_rewards * trained


class GroupSettings(AdvantageSettings):
    """The settings of advantages `dr_grpo` and `rloo`."""

    compares_group = True


class NormalizedGroupSettings(GroupSettings):
    """The settings of advantages `grpo`, which divides by the group's standard deviation, and `reinforce_baseline`,
    which divides by the batch's."""

    eps: float = Field(1e-6, gt=0, description="added to the standard deviation")


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs, settings: NormalizedGroupSettings) -> Tensor:
    found = group_normalized_advantages(inputs.totals, inputs.group_ids, settings.eps, inputs.trajectory_ids)
    return inputs.on_tokens(found)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(inputs: AdvantageInputs, settings: GroupSettings) -> Tensor:
    return inputs.on_tokens(group_centered_advantages(inputs.totals, inputs.group_ids, inputs.trajectory_ids))


@ADVANTAGES.register("rloo")
def rloo(inputs: AdvantageInputs, settings: GroupSettings) -> Tensor:
    return inputs.on_tokens(leave_one_out_advantages(inputs.totals, inputs.group_ids, inputs.trajectory_ids))


class OPMDSettings(GroupSettings):
    """The settings of advantage `opmd`."""

    tau: float = Field(1.0, gt=0, description="temperature, in units of reward")


@ADVANTAGES.register("opmd")
def opmd(inputs: AdvantageInputs, settings: OPMDSettings) -> Tensor:
    found = mirror_descent_advantages(inputs.totals, inputs.group_ids, settings.tau, inputs.trajectory_ids)
    return inputs.on_tokens(found)


class ReinforcePPSettings(AdvantageSettings):
    """The settings of advantage `reinforce_pp`."""

    eps: float = Field(1e-6, gt=0, description="added to the batch's standard deviation")


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(inputs: AdvantageInputs, settings: ReinforcePPSettings) -> Tensor:
    """The rewards from each token on, normalized over the batch (REINFORCE++, arXiv 2501.03262)."""
    to_go = rewards_of_tokens(inputs).flip(1).cumsum(1).flip(1) * inputs.loss_mask
    return batch_normalized(to_go, inputs.loss_mask, settings.eps)


@ADVANTAGES.register("reinforce_baseline")
def reinforce_baseline(inputs: AdvantageInputs, settings: NormalizedGroupSettings) -> Tensor:
    """r − mean_group, then normalized over the batch (REINFORCE++ with baseline, arXiv 2501.03262)."""
    centered = group_centered_advantages(inputs.totals, inputs.group_ids, inputs.trajectory_ids)
    return batch_normalized(inputs.on_tokens(centered), inputs.loss_mask, settings.eps)


class GAESettings(AdvantageSettings):
    """The settings of advantage `gae`."""

    needs_critic = True
    gamma: float = Field(1.0, gt=0, le=1, description="discount, a token")
    lam: float = Field(0.95, ge=0, le=1, description="decay, a token")


@ADVANTAGES.register("gae")
def gae(inputs: AdvantageInputs, settings: GAESettings) -> Tensor:
    assert inputs.values is not None, "the configuration asks for a critic"
    rewards = rewards_of_tokens(inputs)
    return generalized_advantages(rewards, inputs.values, inputs.loss_mask, settings.gamma, settings.lam)
