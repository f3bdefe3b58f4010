"""Advantages from rewards.

Group statistics are per trajectory, never per turn or token. A trajectory of several rows counts once, with their mean
reward. Statistics are computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.registry import MethodRegistry, MethodSettings
from archon.rl.algorithms.steps import Step
from archon.schema.config import StrictModel


class OverlongConfig(StrictModel):
    """Treatment of answers at or near the generation limit."""

    mask_truncated: bool = Field(
        False, description="do not train answers that were cut off at a length limit; their rewards still count"
    )
    penalty: float = Field(0.0, ge=0, description="subtracted from the reward of an answer of maximum length")
    buffer: float = Field(0.2, gt=0, le=1, description="last fraction of max_new_tokens: the penalty grows from 0")


class RewardConfig(StrictModel):
    """Reward transform clip((r + bias) · scale, −clip, clip), as in AReaL."""

    bias: float = Field(0.0, description="added to every reward")
    scale: float = Field(1.0, gt=0, description="factor after the bias")
    clip: float | None = Field(None, gt=0, description="largest absolute value after scaling; null: unbounded")

    def transform(self, rewards: Tensor) -> Tensor:
        """Return the transformed rewards, in the shape and dtype of `rewards`."""
        scaled = (rewards + self.bias) * self.scale
        return scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), float [B].

    For `lengths`, int [B], it is 0 up to `max_tokens − buffer` (L_max − L_cache), falls linearly to −1 at
    `max_tokens`, and stays −1 beyond.
    """
    return ((max_tokens - buffer - lengths.float()) / max(buffer, 1)).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage function for a batch.

    Attributes:
        rewards: float [B], one per row.
        group_ids: int [B], at least 0; rows with the same id answer the same prompt. Groups may differ in size.
        loss_mask: [B, S], 1 at trained tokens.
        token_rewards: float [B, S], per-token rewards such as a KL penalty; None: zeros.
        values: float [B, S], critic's return estimate before each token; None: no critic.
        trajectory_ids: int [B]; rows of a group with the same id are one trajectory. None: each row is one.
        steps: steps of all rows in order, if the advantage has `needs_steps`.
        logprobs: float [B, S], logprobs of the sampled tokens under the policy before the update.
        teacher_logprobs: float [B, S], logprobs of the sampled tokens under the teacher; None: no teacher.
        reward_parts: float [B] by name, the summands of the rewards; NaN if a row's reward lacks the part.
    """

    rewards: Tensor
    group_ids: Tensor
    loss_mask: Tensor
    token_rewards: Tensor | None = None
    values: Tensor | None = None
    trajectory_ids: Tensor | None = None
    steps: tuple[Step, ...] = ()
    logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    reward_parts: Mapping[str, Tensor] | None = None

    @property
    def totals(self) -> Tensor:
        """Sum of each row's rewards, float [B]."""
        if self.token_rewards is None:
            return self.rewards
        return self.rewards + (self.token_rewards * self.loss_mask).sum(1).to(self.rewards.dtype)

    @property
    def groups(self) -> Groups:
        """Groups of `totals`."""
        return Groups(self.totals, self.group_ids, self.trajectory_ids)

    @property
    def token_totals(self) -> Tensor:
        """Reward of each token, float [B, S]; the last trained token gets the row's reward."""
        trained = self.loss_mask > 0
        position = torch.arange(trained.shape[1], device=trained.device)
        last = position == torch.where(trained, position, -1).amax(1, keepdim=True)
        rewards = torch.where(last, self.rewards.unsqueeze(1), 0.0)
        return rewards if self.token_rewards is None else rewards + self.token_rewards * trained

    def broadcast_to_tokens(self, advantages: Tensor) -> Tensor:
        """Broadcast row advantages [B] to the trained tokens [B, S], in the dtype of `rewards`."""
        return advantages.to(self.rewards.dtype).unsqueeze(1) * self.loss_mask


class AdvantageSettings(MethodSettings):
    """Settings of an advantage.

    Attributes:
        is_group_relative: whether it compares answers to one prompt; a group then needs two.
        needs_critic: whether it reads `AdvantageInputs.values`.
        needs_steps: whether it reads `AdvantageInputs.steps`.
        needs_teacher: whether it reads `AdvantageInputs.teacher_logprobs`.
        needs_parts: whether it reads `AdvantageInputs.reward_parts` in place of the rewards.
    """

    is_group_relative: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False
    needs_steps: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    needs_parts: ClassVar[bool] = False


# (rewards and values, settings) -> advantages [B, S], 0 where no token is trained
AdvantageFn = Callable[[AdvantageInputs, Any], Tensor]
ADVANTAGES: MethodRegistry[AdvantageFn] = MethodRegistry("advantage", AdvantageSettings)


class Groups:
    """B rows grouped into T trajectories, and trajectories into groups.

    Attributes:
        row_rewards: float64 [B].
        rewards: float64 [T], mean over the rows of each trajectory; exact if all rows agree.
        count: float64 [T], number of trajectories in the group.
        mean: float64 [T], mean reward of the group.
        has_variance: bool [T], whether the rewards of the group differ.
        trajectory_index: int64 [B], trajectory of each row.
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor | None = None) -> None:
        self.row_rewards = rewards.double()
        ids = torch.arange(len(rewards)) if trajectory_ids is None else trajectory_ids
        self.trajectory_index = ids.to(rewards.device).unique(return_inverse=True)[1]
        low, high, mean = (
            _scatter(self.trajectory_index, self.row_rewards, reduce) for reduce in ("amin", "amax", "mean")
        )
        self.rewards = torch.where(low == high, low, mean)
        self._group = _scatter(self.trajectory_index, group_ids.long(), "amax")
        self.count = self.sum(torch.ones_like(self.rewards))
        self.mean = self.sum(self.rewards) / self.count
        self.has_variance = self.max(self.rewards) > -self.max(-self.rewards)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over each trajectory's group, [T]."""
        return _scatter(self._group, values, "sum")[self._group]

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum over each trajectory's group, [T]."""
        return _scatter(self._group, values, "amax")[self._group]

    def subtract_baseline(self, baseline: Tensor) -> Tensor:
        """Return row rewards minus the baseline [T] of their trajectory, float64 [B].

        Groups without variance get exactly 0: rounding errors must not be trained on.
        """
        return torch.where(
            self.has_variance[self.trajectory_index], self.row_rewards - baseline[self.trajectory_index], 0.0
        )


def _scatter(index: Tensor, values: Tensor, reduce: str) -> Tensor:
    """Reduce the values of each index by `sum`, `mean`, `amax` or `amin`."""
    size = int(index.max()) + 1 if index.numel() else 0
    return values.new_zeros(size).scatter_reduce(0, index, values, reduce, include_self=False)


def normalized_rows(groups: Groups, eps: float) -> Tensor:
    """Return (r − mean_group) / (std_group + eps) of each row, float64 [B]; std is unbiased (n − 1)."""
    centered = torch.where(groups.has_variance, groups.rewards - groups.mean, 0.0)
    std = (groups.sum(centered.square()) / (groups.count - 1).clamp(min=1)).sqrt()
    return groups.subtract_baseline(groups.mean) / (std + eps)[groups.trajectory_index]


def batch_normalized(advantages: Tensor, loss_mask: Tensor, eps: float) -> Tensor:
    """Return (A − mean) / (std + eps) over all trained tokens of the batch, [B, S].

    The standard deviation is biased (n). The result is 0 if all tokens are equal.
    """
    trained = loss_mask > 0
    values = advantages[trained].double()
    if values.numel() == 0 or bool(values.max() == values.min()):
        return torch.zeros_like(advantages)
    normal = (advantages.double() - values.mean()) / (values.std(correction=0) + eps)
    return torch.where(trained, normal, 0.0).to(advantages.dtype)


def generalized_advantages(
    token_rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Return GAE advantages [B, S] (arXiv 1506.02438, equations 11 to 16).

    δ_t = r_t + γV_{t+1} − V_t and A_t = δ_t + γλA_{t+1}. t runs over trained tokens only: tokens between two turns are
    no actions. V is 0 after the last trained token.

    Args:
        token_rewards: float [B, S].
        values: float [B, S]; `values[:, t]` is the estimate before token t.
        loss_mask: [B, S].
        gamma: discount γ per token.
        lam: decay λ per token.
    """
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values))
    running = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        trained = loss_mask[:, t] > 0
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(trained, delta + gamma * lam * running, running)
        next_value = torch.where(trained, values[:, t], next_value)
        advantages[:, t] = torch.where(trained, running, 0.0)
    return advantages


class GroupSettings(AdvantageSettings):
    """Settings of advantages `dr_grpo` and `rloo`."""

    is_group_relative = True


class NormalizedGroupSettings(GroupSettings):
    """Settings of advantages `grpo` (divides by the group's std) and `reinforce_baseline` (batch std)."""

    eps: float = Field(1e-6, gt=0, description="added to the standard deviation")


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs, settings: NormalizedGroupSettings) -> Tensor:
    """GRPO: (r − mean_group) / (std_group + eps) (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The paper does not name the estimator of the standard deviation. It is unbiased (n − 1) here, like in the public
    implementations.
    """
    return inputs.broadcast_to_tokens(normalized_rows(inputs.groups, settings.eps))


@ADVANTAGES.register("dr_grpo")
def dr_grpo(inputs: AdvantageInputs, settings: GroupSettings) -> Tensor:
    """Dr. GRPO: r − mean_group, without a standard deviation (arXiv 2503.20783, section 3.2)."""
    groups = inputs.groups
    return inputs.broadcast_to_tokens(groups.subtract_baseline(groups.mean))


@ADVANTAGES.register("rloo")
def rloo(inputs: AdvantageInputs, settings: GroupSettings) -> Tensor:
    """RLOO: r − mean of the group's other trajectories (arXiv 2402.14740, section 3.3); 0 for a group of one."""
    groups = inputs.groups
    leave_one_out = (groups.mean * groups.count - groups.rewards) / (groups.count - 1).clamp(min=1)
    return inputs.broadcast_to_tokens(groups.subtract_baseline(leave_one_out))


class OPMDSettings(GroupSettings):
    """Settings of advantage `opmd`."""

    tau: float = Field(1.0, gt=0, description="temperature, in units of reward")


@ADVANTAGES.register("opmd")
def opmd(inputs: AdvantageInputs, settings: OPMDSettings) -> Tensor:
    """OPMD: r − τ log mean_group exp(r / τ) (Kimi k1.5, arXiv 2501.12599, section 2.3.2).

    The second term is the group's estimate of the log-partition function of policy mirror descent.
    """
    groups = inputs.groups
    highest = groups.max(groups.rewards)
    mean = groups.sum(((groups.rewards - highest) / settings.tau).exp()) / groups.count
    return inputs.broadcast_to_tokens(groups.subtract_baseline(highest + settings.tau * mean.log()))


class ReinforcePPSettings(AdvantageSettings):
    """Settings of advantage `reinforce_pp`."""

    eps: float = Field(1e-6, gt=0, description="added to the standard deviation")


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(inputs: AdvantageInputs, settings: ReinforcePPSettings) -> Tensor:
    """REINFORCE++: reward to go of each token, normalized over the batch (arXiv 2501.03262)."""
    to_go = inputs.token_totals.flip(1).cumsum(1).flip(1) * inputs.loss_mask
    return batch_normalized(to_go, inputs.loss_mask, settings.eps)


@ADVANTAGES.register("reinforce_baseline")
def reinforce_baseline(inputs: AdvantageInputs, settings: NormalizedGroupSettings) -> Tensor:
    """REINFORCE++ with baseline: r − mean_group, normalized over the batch (arXiv 2501.03262)."""
    return batch_normalized(dr_grpo(inputs, settings), inputs.loss_mask, settings.eps)


class GAESettings(AdvantageSettings):
    """Settings of advantage `gae`."""

    needs_critic = True
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="decay per token")


@ADVANTAGES.register("gae")
def gae(inputs: AdvantageInputs, settings: GAESettings) -> Tensor:
    """GAE with the critic's values; see `generalized_advantages`."""
    assert inputs.values is not None, "the configuration requires a critic"
    return generalized_advantages(inputs.token_totals, inputs.values, inputs.loss_mask, settings.gamma, settings.lam)
