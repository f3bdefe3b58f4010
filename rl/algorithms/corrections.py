"""Corrections for the mismatch between generator and trainer (rounding, stale weights).

A correction returns policy-loss weights without gradient, computed from log(π_prox / π_behave): the trainer's policy
before the update over the generator's policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from archon.rl.algorithms.kl import binary_kl
from archon.rl.algorithms.registry import MethodRegistry, MethodSettings

# (log ratio [B, S], loss_mask [B, S], generator's logprobs [B, S], settings) -> (weights [B, S], touched [B, S] bool)
CorrectionFn = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]
CORRECTIONS: MethodRegistry[CorrectionFn] = MethodRegistry("mismatch correction", MethodSettings)


@CORRECTIONS.register("none")
def no_correction(
    log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: MethodSettings
) -> tuple[Tensor, Tensor]:
    """Return weight 1 for every token; the policy does not recompute logprobs."""
    return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)


class TruncatedImportanceSampling(MethodSettings):
    """Settings of corrections `tis` and `sequence_tis`."""

    max_ratio: float = Field(2.0, gt=0, description="upper bound of the ratio")


@CORRECTIONS.register("tis")
def tis(
    log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: TruncatedImportanceSampling
) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: min(ρ, C) (Ionides 2008; for rollouts Yao et al. 2025)."""
    ratio = log_ratio.exp()
    return ratio.clamp(max=settings.max_ratio), ratio > settings.max_ratio


class IcePop(MethodSettings):
    """Settings of correction `icepop`."""

    min_ratio: float = Field(0.5, ge=0, description="tokens with a smaller ratio are masked")
    max_ratio: float = Field(2.0, gt=0, description="tokens with a larger ratio are masked")

    @model_validator(mode="after")
    def _check_bounds(self) -> IcePop:
        if self.min_ratio >= self.max_ratio:
            raise ValueError(f"min_ratio {self.min_ratio} is not below max_ratio {self.max_ratio}")
        return self

    def is_outside(self, ratio: Tensor) -> Tensor:
        """Return whether each ratio is outside the bounds, bool [B, S]."""
        return (ratio < self.min_ratio) | (ratio > self.max_ratio)


@CORRECTIONS.register("icepop")
def icepop(log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: IcePop) -> tuple[Tensor, Tensor]:
    """IcePop: ρ within [min_ratio, max_ratio], else 0 (Ling team 2025, arXiv 2510.18855)."""
    ratio = log_ratio.exp()
    outside = settings.is_outside(ratio)
    return torch.where(outside, 0.0, ratio), outside


class KPop(MethodSettings):
    """Settings of correction `kpop`, with its authors' default."""

    max_divergence: float = Field(0.1, gt=0, description="tokens with a larger binary KL in a direction are masked")


@CORRECTIONS.register("kpop")
def kpop(log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: KPop) -> tuple[Tensor, Tensor]:
    """KPop: ρ if max(D(p ‖ q), D(q ‖ p)) ≤ φ, else 0.

    p and q are the token's probabilities under trainer and generator. D(p ‖ q) = p log(p/q) + (1 − p)
    log((1 − p)/(1 − q)) is the binary KL (Guo et al. 2026, "Taming training-inference mismatch in reinforcement
    learning with adaptive masking regions").
    """
    generated, trained = logprobs.double().exp(), (logprobs.double() + log_ratio.double()).exp()
    outside = binary_kl(trained, generated).maximum(binary_kl(generated, trained)) > settings.max_divergence
    return torch.where(outside, 0.0, log_ratio.exp()), outside


class SequenceMask(IcePop):
    """Settings of correction `sequence_mask`."""

    min_ratio: float = Field(0.0, ge=0, description="answers with a smaller ratio are masked")
    max_ratio: float = Field(2.0, gt=0, description="answers with a larger ratio are masked")


class GeometricMask(IcePop):
    """Settings of correction `geometric_mask`."""

    min_ratio: float = Field(0.99, ge=0, description="answers with a smaller mean ratio are masked")
    max_ratio: float = Field(1.01, gt=0, description="answers with a larger mean ratio are masked")


class K3Mask(MethodSettings):
    """Settings of correction `k3_mask`."""

    max_divergence: float = Field(0.01, gt=0, description="answers with a larger mean KL a token are masked")


@CORRECTIONS.register("sequence_tis")
def sequence_tis(
    log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: TruncatedImportanceSampling
) -> tuple[Tensor, Tensor]:
    """Sequence-level truncated importance sampling: min(Π ρ, C) on each token of an answer."""
    ratio = _sum_of_answer(log_ratio, loss_mask).exp()
    return ratio.clamp(max=settings.max_ratio), ratio > settings.max_ratio


@CORRECTIONS.register("sequence_mask")
def sequence_mask(
    log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: SequenceMask
) -> tuple[Tensor, Tensor]:
    """Sequence-level masked importance sampling: Π ρ within [min_ratio, max_ratio], else 0, on each token of an answer.

    Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference
    mismatch".
    """
    ratio = _sum_of_answer(log_ratio, loss_mask).exp()
    outside = settings.is_outside(ratio)
    return torch.where(outside, 0.0, ratio), outside


@CORRECTIONS.register("geometric_mask")
def geometric_mask(
    log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: GeometricMask
) -> tuple[Tensor, Tensor]:
    """Answers whose geometric mean of ρ is outside [min_ratio, max_ratio] are masked; the others have weight 1.

    Source: as `sequence_mask`. The mean does not depend on the length of an answer, as the product does.
    """
    ratio = (_sum_of_answer(log_ratio, loss_mask) / loss_mask.sum(1, keepdim=True).clamp(min=1)).exp()
    outside = settings.is_outside(ratio)
    return torch.where(outside, 0.0, torch.ones_like(ratio)), outside


@CORRECTIONS.register("k3_mask")
def k3_mask(log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: K3Mask) -> tuple[Tensor, Tensor]:
    """Answers whose mean of ρ − 1 − log ρ is above max_divergence are masked; the others have weight 1.

    The mean estimates KL(generator ‖ trainer) a token (Schulman 2020, "Approximating KL divergence", k3).
    """
    divergence = _sum_of_answer(log_ratio.expm1() - log_ratio, loss_mask)
    outside = divergence / loss_mask.sum(1, keepdim=True).clamp(min=1) > settings.max_divergence
    return torch.where(outside, 0.0, torch.ones_like(divergence)), outside


def _sum_of_answer(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the sum over each row's trained tokens at each of its tokens, [B, S]."""
    return torch.where(loss_mask > 0, values, 0.0).sum(1, keepdim=True).expand_as(values)
