"""Advantages from rewards. Group statistics are per trajectory, never per turn or token: one that is trained as several
rows, one an answer, counts once, with the mean of their rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from archon.rl.algorithms.registry import Registry

if TYPE_CHECKING:
    from archon.rl.algorithms.config import AlgorithmConfig


@dataclass(frozen=True)
class Outcomes:
    """What the rows of a batch have earned. Tokens that are not trained on earn nothing and have no value.

    Args:
        rewards: float [B], of whole rows.
        group_ids: int [B], 0 ≤ id; rows with the same id answer the same prompt. Groups may differ in size.
        loss_mask: [B, S], 1 at trained tokens.
        token_rewards: float [B, S], earned by single tokens beside that, such as a KL penalty; None: nothing.
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
        """Float [B]: everything a row has earned."""
        if self.token_rewards is None:
            return self.rewards
        return self.rewards + (self.token_rewards * self.loss_mask).sum(1).to(self.rewards.dtype)

    def on_tokens(self, advantages: Tensor) -> Tensor:
        """One number a row [B], on each of its trained tokens [B, S]."""
        return advantages.unsqueeze(1) * self.loss_mask


# (what was earned, configuration) -> advantages [B, S], 0 where no token is trained
AdvantageFn = Callable[[Outcomes, "AlgorithmConfig"], Tensor]
ADVANTAGES: Registry[AdvantageFn] = Registry("advantage")
GROUP_ADVANTAGES = frozenset({"grpo", "dr_grpo", "rloo", "opmd", "reinforce_baseline"})
"""Those that compare the answers to one prompt, so that a group needs two."""


class Groups:
    """Rows by trajectory, and trajectories by group.

    Args:
        rewards: float [B], of rows.
        group_ids: int [B].
        trajectory_ids: int [B], or None, as `Outcomes` has them.

    Attributes:
        rewards: float64 [B].
        earned: float64 [T], of trajectories: the mean over its rows, exactly their reward where they have the same.
        count: float64 [T], trajectories in the group of each.
        mean: float64 [T], over that group.
        spread: bool [T]: does the group hold two trajectories that earned differently? Else there is nothing to learn.
        of_row: int64 [B], the trajectory of each row.
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor | None = None) -> None:
        self.rewards = rewards.double()
        ids = torch.arange(len(rewards)) if trajectory_ids is None else trajectory_ids
        self.of_row = ids.to(rewards.device).unique(return_inverse=True)[1]
        low, high, mean = (_over(self.of_row, self.rewards, reduce) for reduce in ("amin", "amax", "mean"))
        self.earned = torch.where(low == high, low, mean)
        self._group = _over(self.of_row, group_ids.long(), "amax")
        self.count = self.sum(torch.ones_like(self.earned))
        self.mean = self.sum(self.earned) / self.count
        self.spread = self.highest(self.earned) > -self.highest(-self.earned)

    def sum(self, values: Tensor) -> Tensor:
        """Over the group of each trajectory, [T]."""
        return _over(self._group, values, "sum")[self._group]

    def highest(self, values: Tensor) -> Tensor:
        """In the group of each trajectory, [T]."""
        return _over(self._group, values, "amax")[self._group]

    def ahead_of(self, baseline: Tensor) -> Tensor:
        """Float64 [B]: each row's reward less its trajectory's `baseline` [T]; exactly 0 without spread, where rounding
        would otherwise pass for a signal."""
        return torch.where(self.spread[self.of_row], self.rewards - baseline[self.of_row], 0.0)


def _over(index: Tensor, values: Tensor, reduce: str) -> Tensor:
    """`sum`, `mean`, `amax` or `amin` of the values with each index, from 0 to the highest."""
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
        trajectory_ids: as `Outcomes` has them.

    Returns:
        Advantages [B] in the dtype of `rewards`.
    """
    groups = Groups(rewards, group_ids, trajectory_ids)
    centred = torch.where(groups.spread, groups.earned - groups.mean, 0.0)
    std = (groups.sum(centred.square()) / (groups.count - 1).clamp(min=1)).sqrt()
    return (groups.ahead_of(groups.mean) / (std + eps)[groups.of_row]).to(rewards.dtype)


def group_centred_advantages(rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor | None = None) -> Tensor:
    """r − mean_group, not divided by a standard deviation (Dr. GRPO, arXiv 2503.20783, section 3.2), [B]."""
    groups = Groups(rewards, group_ids, trajectory_ids)
    return groups.ahead_of(groups.mean).to(rewards.dtype)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor | None = None) -> Tensor:
    """r − the mean of the group's other trajectories (RLOO, arXiv 2402.14740, section 3.3), [B]; 0 for one alone."""
    groups = Groups(rewards, group_ids, trajectory_ids)
    others = (groups.mean * groups.count - groups.earned) / (groups.count - 1).clamp(min=1)
    return groups.ahead_of(others).to(rewards.dtype)


def mirror_descent_advantages(
    rewards: Tensor, group_ids: Tensor, tau: float, trajectory_ids: Tensor | None = None
) -> Tensor:
    """r − τ log mean_group exp(r / τ), [B]: the reward less the group's estimate of the log-partition function of
    policy mirror descent (Kimi k1.5, arXiv 2501.12599, section 2.3.2)."""
    groups = Groups(rewards, group_ids, trajectory_ids)
    highest = groups.highest(groups.earned)
    mean = groups.sum(((groups.earned - highest) / tau).exp()) / groups.count
    return groups.ahead_of(highest + tau * mean.log()).to(rewards.dtype)


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


def rewards_of_tokens(outcomes: Outcomes) -> Tensor:
    """Float [B, S]: what each token has earned, the trajectory's reward with its last trained token."""
    trained = outcomes.loss_mask > 0
    place = torch.arange(trained.shape[1], device=trained.device)
    last = place == torch.where(trained, place, -1).amax(1, keepdim=True)
    earned = torch.where(last, outcomes.rewards.unsqueeze(1), 0.0)
    return earned if outcomes.token_rewards is None else earned + outcomes.token_rewards * trained


@ADVANTAGES.register("grpo")
def _grpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    found = group_normalized_advantages(
        outcomes.totals, outcomes.group_ids, config.advantage_eps, outcomes.trajectory_ids
    )
    return outcomes.on_tokens(found)


@ADVANTAGES.register("dr_grpo")
def _dr_grpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    return outcomes.on_tokens(_centred(outcomes))


@ADVANTAGES.register("rloo")
def _rloo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    found = leave_one_out_advantages(outcomes.totals, outcomes.group_ids, outcomes.trajectory_ids)
    return outcomes.on_tokens(found)


@ADVANTAGES.register("opmd")
def _opmd(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    found = mirror_descent_advantages(outcomes.totals, outcomes.group_ids, config.opmd_tau, outcomes.trajectory_ids)
    return outcomes.on_tokens(found)


@ADVANTAGES.register("reinforce_pp")
def _reinforce_pp(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """What is earned from each token on, normalised over the batch (REINFORCE++, arXiv 2501.03262)."""
    earned = rewards_of_tokens(outcomes)
    to_go = earned.flip(1).cumsum(1).flip(1) * outcomes.loss_mask
    return batch_normalized(to_go, outcomes.loss_mask, config.advantage_eps)


@ADVANTAGES.register("reinforce_baseline")
def _reinforce_baseline(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """r − mean_group, then normalised over the batch (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return batch_normalized(outcomes.on_tokens(_centred(outcomes)), outcomes.loss_mask, config.advantage_eps)


def _centred(outcomes: Outcomes) -> Tensor:
    return group_centred_advantages(outcomes.totals, outcomes.group_ids, outcomes.trajectory_ids)


@ADVANTAGES.register("gae")
def _gae(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    assert outcomes.values is not None, "the configuration asks for a critic"
    earned = rewards_of_tokens(outcomes)
    return generalized_advantages(earned, outcomes.values, outcomes.loss_mask, config.gae_gamma, config.gae_lambda)
