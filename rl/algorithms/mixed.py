"""Policy losses that train on demonstrations together with the policy's own answers."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyTerms, PPOLoss, TokenLoss, clipped_loss
from archon.rl.algorithms.registry import MethodSettings


class MixedLoss(PPOLoss):
    """The settings of a loss (1 − μ)·L_policy + μ·L_demonstrations, each a mean by the run's aggregation."""

    uses_demonstrations = True

    def weight_at(self, step: int) -> float:
        """Returns μ of the step, from 0."""
        raise NotImplementedError


class MixLoss(MixedLoss):
    """The settings of policy loss `mix`, with the default of its published implementation."""

    mu: float = Field(0.1, ge=0, le=1, description="weight of the demonstrations; the policy's answers have 1 - mu")

    def weight_at(self, step: int) -> float:
        return self.mu


class ChordLoss(MixedLoss):
    """The settings of policy loss `chord`, with the defaults of CHORD-φ: φ and a constant μ."""

    mu_peak: float = Field(0.1, ge=0, le=1, description="weight of the demonstrations after the warm-up")
    mu_valley: float = Field(0.1, ge=0, le=1, description="their weight after the decay")
    mu_warmup_steps: int = Field(0, ge=0, description="steps in which the weight grows linearly from 0 to its peak")
    mu_decay_steps: int = Field(0, ge=0, description="steps after these in which it falls to its valley, as a cosine")
    phi: bool = Field(True, description="weigh a demonstration's token by p(1 - p), with p its probability")

    def weight_at(self, step: int) -> float:
        if step < self.mu_warmup_steps:
            return self.mu_peak * step / self.mu_warmup_steps
        done = step - self.mu_warmup_steps
        if done >= self.mu_decay_steps:
            return self.mu_valley
        height = 0.5 * (1 + math.cos(math.pi * done / self.mu_decay_steps))
        return self.mu_valley + (self.mu_peak - self.mu_valley) * height


def mixed_loss(terms: PolicyTerms, settings: MixedLoss, demonstrated: Tensor) -> TokenLoss:
    """Returns `demonstrated` [T] at the tokens of demonstrations, and PPO's clipped loss at the others."""
    assert terms.demonstrations is not None, "the configuration asks for demonstrations"
    given = terms.demonstrations > 0
    policy = clipped_loss(terms.ratio, terms.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)
    return TokenLoss(torch.where(given, demonstrated, policy.loss), policy.ratio, policy.clipped & ~given)


@POLICY_LOSSES.register("mix")
def mix(terms: PolicyTerms, settings: MixLoss) -> TokenLoss:
    """PPO's loss, and −log π for demonstrations (MIX, Trinity-RFT, arXiv 2505.17826)."""
    return mixed_loss(terms, settings, -terms.logprobs)


@POLICY_LOSSES.register("chord")
def chord(terms: PolicyTerms, settings: ChordLoss) -> TokenLoss:
    """PPO's loss, and −sg[φ]·log π for demonstrations, with φ = p(1 − p) and p = π, or φ = 1 (CHORD, arXiv 2508.11408,
    section 3): a token that is certain already, or that the policy would never give, moves it little."""
    probability = terms.logprobs.detach().exp()
    phi = probability * (1 - probability) if settings.phi else torch.ones_like(probability)
    return mixed_loss(terms, settings, -phi * terms.logprobs)


def mixing_weights(loss_mask: Tensor, demonstrations: Tensor, mu: float, aggregation: MethodSettings) -> Tensor:
    """Returns the weight of every row of a batch, float64 [B], with which the aggregation of all rows is (1 − μ) times
    that of the policy's rows plus μ times that of the demonstrations.

    Args:
        loss_mask: [B, S].
        demonstrations: bool [B], whether a row is a demonstration.
        mu: μ.
        aggregation: the settings of the run's aggregation.
    """
    units = [_units(loss_mask[rows], aggregation) for rows in (~demonstrations, demonstrations)]
    whole = sum(units)
    own, given = ((share * whole / n if n else 0.0) for share, n in zip((1 - mu, mu), units, strict=True))
    return torch.tensor([own, given], dtype=torch.float64)[demonstrations.long()]


def _units(loss_mask: Tensor, aggregation: MethodSettings) -> float:
    if not loss_mask.numel():
        return 0.0
    rows = torch.arange(len(loss_mask)).repeat_interleave(loss_mask.shape[1])
    return float(AGGREGATIONS[aggregation.kind](loss_mask.flatten().double(), rows, len(loss_mask), aggregation)[1])
