"""Policy losses that mix demonstrations with the policy's answers."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.aggregation import count_units
from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyTerms, PPOLoss, TokenLoss, clipped_loss
from archon.rl.algorithms.registry import MethodSettings


class MixedLoss(PPOLoss):
    """Settings of a loss (1 − μ)·L_policy + μ·L_demonstrations, each averaged by the run's aggregation."""

    uses_demonstrations = True

    def weight_at(self, step: int) -> float:
        """Return μ at a step, counted from 0."""
        raise NotImplementedError


class MixLoss(MixedLoss):
    """Settings of policy loss `mix`, with the default of its published implementation."""

    mu: float = Field(0.1, ge=0, le=1, description="weight of demonstrations; the policy's answers have 1 - mu")

    def weight_at(self, step: int) -> float:
        """Return the constant μ."""
        return self.mu


class ChordLoss(MixedLoss):
    """Settings of policy loss `chord`, with the defaults of CHORD-φ: φ and a constant μ."""

    mu_peak: float = Field(0.1, ge=0, le=1, description="weight of demonstrations after the warm-up")
    mu_valley: float = Field(0.1, ge=0, le=1, description="weight of demonstrations after the decay")
    mu_warmup_steps: int = Field(0, ge=0, description="steps of linear growth from 0 to mu_peak")
    mu_decay_steps: int = Field(0, ge=0, description="steps of cosine decay to mu_valley after the warm-up")
    phi: bool = Field(True, description="weight a demonstration token by p(1 - p), p its probability")

    def weight_at(self, step: int) -> float:
        """Return μ: linear warm-up, then cosine decay."""
        if step < self.mu_warmup_steps:
            return self.mu_peak * step / self.mu_warmup_steps
        done = step - self.mu_warmup_steps
        if done >= self.mu_decay_steps:
            return self.mu_valley
        height = 0.5 * (1 + math.cos(math.pi * done / self.mu_decay_steps))
        return self.mu_valley + (self.mu_peak - self.mu_valley) * height


def mixed_loss(terms: PolicyTerms, settings: MixedLoss, demonstration_loss: Tensor) -> TokenLoss:
    """Return `demonstration_loss` [T] at tokens of demonstrations, PPO's clipped loss elsewhere."""
    assert terms.demonstrations is not None, "the configuration requires demonstrations"
    is_demo = terms.demonstrations > 0
    policy = clipped_loss(terms.ratio, terms.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)
    return TokenLoss(torch.where(is_demo, demonstration_loss, policy.loss), policy.ratio, policy.clipped & ~is_demo)


@POLICY_LOSSES.register("mix")
def mix(terms: PolicyTerms, settings: MixLoss) -> TokenLoss:
    """MIX: PPO's loss, and −log π for demonstrations (Trinity-RFT, arXiv 2505.17826)."""
    return mixed_loss(terms, settings, -terms.logprobs)


@POLICY_LOSSES.register("chord")
def chord(terms: PolicyTerms, settings: ChordLoss) -> TokenLoss:
    """CHORD: PPO's loss, and −sg[φ]·log π for demonstrations (arXiv 2508.11408, section 3).

    φ is p(1 − p) with p = π, or 1. Tokens that are already certain or nearly impossible move the policy little.
    """
    probability = terms.logprobs.detach().exp()
    phi = probability * (1 - probability) if settings.phi else torch.ones_like(probability)
    return mixed_loss(terms, settings, -phi * terms.logprobs)


def mixing_weights(loss_mask: Tensor, demonstrations: Tensor, mu: float, aggregation: MethodSettings) -> Tensor:
    """Return row weights, float64 [B], that make the aggregate (1 − μ)·policy + μ·demonstrations.

    Args:
        loss_mask: [B, S].
        demonstrations: bool [B], whether a row is a demonstration.
        mu: weight μ of the demonstrations.
        aggregation: settings of the run's aggregation.
    """
    units = [count_units(loss_mask[rows], aggregation) for rows in (~demonstrations, demonstrations)]
    total = sum(units)
    weights = [(weight * total / n if n else 0.0) for weight, n in zip((1 - mu, mu), units, strict=True)]
    return torch.tensor(weights, dtype=torch.float64)[demonstrations.long()]
