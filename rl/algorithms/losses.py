"""Policy losses: per-token values before masking and aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from archon.rl.algorithms.aggregation import sums_by_document
from archon.rl.algorithms.registry import Registry

if TYPE_CHECKING:
    from archon.rl.algorithms.config import AlgorithmConfig


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy loss is made of, for the T tokens of a micro-batch.

    Args:
        logprobs: float [T], of the policy being trained, with gradient.
        old_logprobs: float [T], of the policy that the ratio is taken to; equal to `logprobs` off the mask.
        advantages: float [T].
        mask: float [T], 1 at trained tokens.
        documents: int [T], which of the `n_documents` trajectories a token belongs to.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    documents: Tensor
    n_documents: int

    @property
    def ratio(self) -> Tensor:
        """π / π_old, [T], with gradient."""
        return (self.logprobs - self.old_logprobs).exp()


class TokenLoss(NamedTuple):
    """Per-token policy loss [T], the ratio π/π_old it is made of [T], and whether a bound decided it [T] (bool)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


PolicyLossFn = Callable[[PolicyTerms, "AlgorithmConfig"], TokenLoss]
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss")

RECOMPUTING_LOSSES = frozenset({"decoupled", "m2po"})
"""Losses that need the policy's logprobs from before the update, besides those of generation."""


def mean_by_document(values: Tensor, mask: Tensor, documents: Tensor, n_documents: int) -> Tensor:
    """The mean over each trajectory's trained tokens, [n_documents]; 0 for one without any."""
    total, count = (sums_by_document(x, documents, n_documents) for x in (values * mask, mask))
    return total / count.clamp(min=1)


def clipped_loss(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """max(−A·ρ, −A·clip(ρ, 1 − eps_low, 1 + eps_high)) (PPO, arXiv 1707.06347, equation 7, negated).

    Two bounds as DAPO has them (arXiv 2503.14476, equation 10); equal bounds are PPO's. `dual_clip` c bounds it by
    −c·A where A is negative (arXiv 1912.09729, equation 7).
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    loss, decided = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, decided = torch.where(beyond, bound, loss), decided | beyond
    return TokenLoss(loss, ratio, decided)


@POLICY_LOSSES.register("ppo")
def _ppo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    return clipped_loss(terms.ratio, terms.advantages, config.clip_eps_low, config.clip_eps_high, config.dual_clip)


@POLICY_LOSSES.register("decoupled")
def _decoupled(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """PPO's, to the policy from before the update in place of the one that generated (AReaL, arXiv 2505.24298, section
    5.2); the weight π_prox / π_behave is the correction's."""
    return _ppo(terms, config)


@POLICY_LOSSES.register("gspo")
def _gspo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """PPO's with the sequence's ratio, s = exp(mean_t log ρ_t), for each of its tokens (GSPO, arXiv 2507.18071, with
    the gradient through every token as its GSPO-token has it)."""
    log_ratio = terms.logprobs - terms.old_logprobs
    mean = mean_by_document(log_ratio.detach(), terms.mask, terms.documents, terms.n_documents)
    ratio = (mean[terms.documents] + terms.logprobs - terms.logprobs.detach()).exp()
    return clipped_loss(ratio, terms.advantages, config.clip_eps_low, config.clip_eps_high, config.dual_clip)


@POLICY_LOSSES.register("cispo")
def _cispo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−sg[clip(ρ, 1 − eps_low, 1 + eps_high)]·A·log π (MiniMax-M1, arXiv 2506.13585, section 3.1)."""
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    return TokenLoss(-weight * terms.advantages * terms.logprobs, ratio, weight != ratio)


@POLICY_LOSSES.register("sapo")
def _sapo(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A·(4/τ)·σ(τ(ρ − 1)), τ by the sign of A (SAPO, arXiv 2511.20347); nothing is clipped."""
    ratio = terms.ratio
    positive, negative = (ratio.new_tensor(tau) for tau in (config.sapo_tau_positive, config.sapo_tau_negative))
    tau = torch.where(terms.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return TokenLoss(-terms.advantages * gate, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@POLICY_LOSSES.register("m2po")
@POLICY_LOSSES.register("importance")
def _importance(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A·ρ without a bound; for `m2po` (arXiv 2510.01161) the tokens that strayed furthest have been left
    out of the mask by `second_moment_mask`."""
    return TokenLoss(-terms.advantages * terms.ratio, terms.ratio, torch.zeros_like(terms.ratio, dtype=torch.bool))


@POLICY_LOSSES.register("reinforce")
def _reinforce(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    """−A·log π (Williams 1992); the ratio is only reported."""
    ratio = terms.ratio.detach()
    return TokenLoss(-terms.advantages * terms.logprobs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def second_moment_mask(log_ratio: Tensor, loss_mask: Tensor, threshold: float) -> Tensor:
    """The trained tokens that M2PO keeps, bool [B, S]: of the whole batch those with the largest (log ρ)² are left out
    until the mean of the rest is at most `threshold` (arXiv 2510.01161).

    Args:
        log_ratio: float [B, S], log π_prox − log π_behave.
        loss_mask: [B, S].
    """
    trained = loss_mask > 0
    moments, order = log_ratio[trained].double().square().sort()
    means = moments.cumsum(0) / torch.arange(1, len(moments) + 1, device=moments.device)
    # Means of ever larger moments only grow, so the kept ones are the first so many.
    kept = torch.zeros_like(trained)
    kept[trained] = torch.zeros_like(order, dtype=torch.bool).scatter(0, order, means <= threshold)
    return kept
