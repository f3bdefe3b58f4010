"""Advantages from rewards. Group statistics are per trajectory, never per turn or token."""

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
    """What a batch of trajectories has earned. Tokens that are not trained on earn nothing and have no value.

    Args:
        rewards: float [B], of whole trajectories.
        group_ids: int [B], 0 ≤ id; trajectories with the same id answer the same prompt. Groups may differ in size.
        loss_mask: [B, S], 1 at trained tokens.
        token_rewards: float [B, S], earned by single tokens beside that, such as a KL penalty; None: nothing.
        values: float [B, S], the critic's estimate of what is still to come before each token; None: no critic.
    """

    rewards: Tensor
    group_ids: Tensor
    loss_mask: Tensor
    token_rewards: Tensor | None = None
    values: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """Float [B]: everything a trajectory has earned."""
        if self.token_rewards is None:
            return self.rewards
        return self.rewards + (self.token_rewards * self.loss_mask).sum(1).to(self.rewards.dtype)

    def on_tokens(self, advantages: Tensor) -> Tensor:
        """One number a trajectory [B], on each of its trained tokens [B, S]."""
        return advantages.unsqueeze(1) * self.loss_mask


# (what was earned, configuration) -> advantages [B, S], 0 where no token is trained
AdvantageFn = Callable[[Outcomes, "AlgorithmConfig"], Tensor]
ADVANTAGES: Registry[AdvantageFn] = Registry("advantage")
GROUP_ADVANTAGES = frozenset({"grpo", "dr_grpo", "rloo", "opmd", "reinforce_baseline"})
"""Those that compare the answers to one prompt, so that a group needs two."""


def groups_with_spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Bool [B]: does the trajectory's group hold at least two different rewards, i.e. is there anything to learn?"""
    return _over_group(rewards, group_ids, "amax") > _over_group(rewards, group_ids, "amin")


def _over_group(values: Tensor, group_ids: Tensor, reduce: str) -> Tensor:
    """`sum`, `amax` or `amin` over the group of each trajectory, [B]."""
    index = group_ids.long()
    n_groups = int(index.max()) + 1 if index.numel() else 0
    return values.new_zeros(n_groups).scatter_reduce(0, index, values, reduce, include_self=False)[index]


def group_centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(r − mean_group, size of the group) for each trajectory, float64 [B] both; the first is exactly 0 in a group of
    equal rewards, where the rounding of the mean would otherwise pass for a signal."""
    r = rewards.double()
    count = _over_group(torch.ones_like(r), group_ids, "sum")
    mean = _over_group(r, group_ids, "sum") / count
    return torch.where(groups_with_spread(rewards, group_ids), r - mean, 0.0), count


def group_normalized_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """(r − mean_group) / (std_group + eps) for each trajectory (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The paper leaves the estimator of the standard deviation open; this is the unbiased one (n − 1), as in the public
    implementations. Computed in float64.

    Args:
        rewards: float [B].
        group_ids: int [B].
        eps: added to the standard deviation.

    Returns:
        Advantages [B] in the dtype of `rewards`.
    """
    centred, count = group_centred(rewards, group_ids)
    std = (_over_group(centred.square(), group_ids, "sum") / (count - 1).clamp(min=1)).sqrt()
    return (centred / (std + eps)).to(rewards.dtype)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """r − the mean of the group's other rewards (RLOO, arXiv 2402.14740, section 3.3), [B]; 0 for an answer alone."""
    centred, count = group_centred(rewards, group_ids)
    # r − (Σ − r)/(n − 1) = (r − Σ/n) · n/(n − 1)
    return (centred * count / (count - 1).clamp(min=1)).to(rewards.dtype)


def mirror_descent_advantages(rewards: Tensor, group_ids: Tensor, tau: float) -> Tensor:
    """r − τ log mean_group exp(r / τ), [B]: the reward less the group's estimate of the log-partition function of
    policy mirror descent (Kimi k1.5, arXiv 2501.12599, section 2.3.2)."""
    r = rewards.double() / tau
    highest = _over_group(r, group_ids, "amax")
    total = _over_group((r - highest).exp(), group_ids, "sum")
    _, count = group_centred(rewards, group_ids)
    baseline = highest + (total / count).log()
    advantages = torch.where(groups_with_spread(rewards, group_ids), (r - baseline) * tau, 0.0)
    return advantages.to(rewards.dtype)


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
    return outcomes.on_tokens(group_normalized_advantages(outcomes.totals, outcomes.group_ids, config.advantage_eps))


@ADVANTAGES.register("dr_grpo")
def _dr_grpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """r − mean_group, not divided by a standard deviation (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return outcomes.on_tokens(group_centred(outcomes.totals, outcomes.group_ids)[0].to(outcomes.rewards.dtype))


@ADVANTAGES.register("rloo")
def _rloo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    return outcomes.on_tokens(leave_one_out_advantages(outcomes.totals, outcomes.group_ids))


@ADVANTAGES.register("opmd")
def _opmd(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    return outcomes.on_tokens(mirror_descent_advantages(outcomes.totals, outcomes.group_ids, config.opmd_tau))


@ADVANTAGES.register("reinforce_pp")
def _reinforce_pp(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """What is earned from each token on, normalised over the batch (REINFORCE++, arXiv 2501.03262)."""
    earned = rewards_of_tokens(outcomes)
    to_go = earned.flip(1).cumsum(1).flip(1) * outcomes.loss_mask
    return batch_normalized(to_go, outcomes.loss_mask, config.advantage_eps)


@ADVANTAGES.register("reinforce_baseline")
def _reinforce_baseline(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """r − mean_group, then normalised over the batch (REINFORCE++ with baseline, arXiv 2501.03262)."""
    centred = group_centred(outcomes.totals, outcomes.group_ids)[0].to(outcomes.rewards.dtype)
    return batch_normalized(outcomes.on_tokens(centred), outcomes.loss_mask, config.advantage_eps)


@ADVANTAGES.register("gae")
def _gae(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    assert outcomes.values is not None, "the configuration asks for a critic"
    earned = rewards_of_tokens(outcomes)
    return generalized_advantages(earned, outcomes.values, outcomes.loss_mask, config.gae_gamma, config.gae_lambda)
