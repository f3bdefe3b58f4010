"""Policy losses: per-token values before masking and aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from archon.rl.algorithms.registry import Registry

if TYPE_CHECKING:
    from archon.rl.config import AlgorithmConfig


class TokenLoss(NamedTuple):
    """Per-token policy loss [T], the ratio π/π_old [T], and whether the clip decided [T] (bool)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


# (logprobs [T], old_logprobs [T], advantages [T], configuration) -> TokenLoss
PolicyLossFn = Callable[[Tensor, Tensor, Tensor, "AlgorithmConfig"], TokenLoss]
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss")


def ppo_clip_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> TokenLoss:
    """max(−A·ρ, −A·clip(ρ, 1 − eps_low, 1 + eps_high)) with ρ = π/π_old (PPO, arXiv 1707.06347, equation 7, negated).

    Two bounds as DAPO has them (arXiv 2503.14476, equation 10); equal bounds are PPO's.
    """
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    return TokenLoss(torch.maximum(unclipped, clipped), ratio, clipped > unclipped)


@POLICY_LOSSES.register("ppo")
def _ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: AlgorithmConfig) -> TokenLoss:
    return ppo_clip_loss(logprobs, old_logprobs, advantages, config.clip_eps_low, config.clip_eps_high)
