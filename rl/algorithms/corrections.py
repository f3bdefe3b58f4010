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


@CORRECTIONS.register("icepop")
def icepop(log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: IcePop) -> tuple[Tensor, Tensor]:
    """IcePop: ρ within [min_ratio, max_ratio], else 0 (Ling team 2025, arXiv 2510.18855)."""
    ratio = log_ratio.exp()
    outside = (ratio < settings.min_ratio) | (ratio > settings.max_ratio)
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
    generated = logprobs.double().exp().clamp(_SMALLEST, 1 - _SMALLEST)
    trained = (logprobs.double() + log_ratio.double()).exp().clamp(_SMALLEST, 1 - _SMALLEST)
    outside = _binary_kl(trained, generated).maximum(_binary_kl(generated, trained)) > settings.max_divergence
    return torch.where(outside, 0.0, log_ratio.exp()), outside


_SMALLEST = 1e-6
"""Probabilities are kept this far from 0 and 1."""


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


@CORRECTIONS.register("sequence_tis")
def sequence_tis(
    log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: TruncatedImportanceSampling
) -> tuple[Tensor, Tensor]:
    """Sequence-level truncated importance sampling: min(Π ρ, C) on each token of an answer."""
    trained = loss_mask > 0
    ratio = torch.where(trained, log_ratio, 0.0).sum(1, keepdim=True).exp().expand_as(log_ratio)
    return ratio.clamp(max=settings.max_ratio), ratio > settings.max_ratio
