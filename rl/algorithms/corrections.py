"""Corrections for a generator and a trainer that do not give a token the same probability, by rounding or by age.

Each is a weight of the policy loss, without gradient, from log(π_prox / π_behave): the trainer's policy before the
update over the one that generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from archon.rl.algorithms.registry import Registry

if TYPE_CHECKING:
    from archon.rl.algorithms.config import AlgorithmConfig

# (log ratio [B, S], loss_mask [B, S], configuration) -> (weights [B, S], touched [B, S] bool)
CorrectionFn = Callable[[Tensor, Tensor, "AlgorithmConfig"], tuple[Tensor, Tensor]]
CORRECTIONS: Registry[CorrectionFn] = Registry("mismatch correction")


@CORRECTIONS.register("none")
def _none(log_ratio: Tensor, loss_mask: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)


@CORRECTIONS.register("tis")
def _truncated(log_ratio: Tensor, loss_mask: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """min(ρ, C): truncated importance sampling (Ionides 2008; for rollouts Yao et al. 2025)."""
    ratio = log_ratio.exp()
    return ratio.clamp(max=config.correction_high), ratio > config.correction_high


@CORRECTIONS.register("icepop")
def _masked(log_ratio: Tensor, loss_mask: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """ρ between two bounds, else 0: a token that strays is left out (IcePop, Ling team 2025, arXiv 2510.18855)."""
    ratio = log_ratio.exp()
    outside = (ratio < config.correction_low) | (ratio > config.correction_high)
    return torch.where(outside, 0.0, ratio), outside


@CORRECTIONS.register("sequence_tis")
def _sequence(log_ratio: Tensor, loss_mask: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """min(Π ρ, C) of the whole answer, on each of its tokens."""
    trained = loss_mask > 0
    ratio = torch.where(trained, log_ratio, 0.0).sum(1, keepdim=True).exp().expand_as(log_ratio)
    return ratio.clamp(max=config.correction_high), ratio > config.correction_high
