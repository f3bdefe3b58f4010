"""Corrections for the mismatch between generator and trainer, which rounding and stale weights cause.

Each returns weights of the policy loss, without gradient, from log(π_prox / π_behave): the trainer's policy before the
update over the policy that generated.
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
    """Weight 1 for every token; the policy is not scored before the update."""
    return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)


class TruncatedImportanceSampling(MethodSettings):
    """The settings of corrections `tis` and `sequence_tis`."""

    max_ratio: float = Field(2.0, gt=0, description="a larger ratio counts as this one")


@CORRECTIONS.register("tis")
def tis(
    log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: TruncatedImportanceSampling
) -> tuple[Tensor, Tensor]:
    """min(ρ, C): truncated importance sampling (Ionides 2008; for rollouts Yao et al. 2025)."""
    ratio = log_ratio.exp()
    return ratio.clamp(max=settings.max_ratio), ratio > settings.max_ratio


class IcePop(MethodSettings):
    """The settings of correction `icepop`."""

    min_ratio: float = Field(0.5, ge=0, description="a token whose ratio is below is left out")
    max_ratio: float = Field(2.0, gt=0, description="a token whose ratio is above is left out")

    @model_validator(mode="after")
    def _check_bounds(self) -> IcePop:
        if self.min_ratio >= self.max_ratio:
            raise ValueError(f"min_ratio {self.min_ratio} is not below max_ratio {self.max_ratio}")
        return self


@CORRECTIONS.register("icepop")
def icepop(log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: IcePop) -> tuple[Tensor, Tensor]:
    """ρ between two bounds, else 0, which masks the token (IcePop, Ling team 2025, arXiv 2510.18855)."""
    ratio = log_ratio.exp()
    outside = (ratio < settings.min_ratio) | (ratio > settings.max_ratio)
    return torch.where(outside, 0.0, ratio), outside


class KPop(MethodSettings):
    """The settings of correction `kpop`, with its authors' default."""

    max_divergence: float = Field(0.1, gt=0, description="a token whose binary KL is larger in a direction is left out")


@CORRECTIONS.register("kpop")
def kpop(log_ratio: Tensor, loss_mask: Tensor, logprobs: Tensor, settings: KPop) -> tuple[Tensor, Tensor]:
    """ρ where max(D(p ‖ q), D(q ‖ p)) ≤ φ, else 0, which masks the token (KPop, Guo et al. 2026, "Taming
    training-inference mismatch in reinforcement learning with adaptive masking regions").

    p and q are the probabilities of the token under trainer and generator, and D(p ‖ q) = p log(p/q) + (1 − p)
    log((1 − p)/(1 − q)) is the KL of the two events that the token is drawn or is not.
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
    """min(Π ρ, C) of the whole answer, on each of its tokens."""
    trained = loss_mask > 0
    ratio = torch.where(trained, log_ratio, 0.0).sum(1, keepdim=True).exp().expand_as(log_ratio)
    return ratio.clamp(max=settings.max_ratio), ratio > settings.max_ratio
