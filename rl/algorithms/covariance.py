"""Policy losses that preserve the entropy by a special loss for tokens with a large covariance (arXiv 2505.22617)."""

from __future__ import annotations

import math

import torch
from pydantic import Field, model_validator
from torch import Tensor

from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyLossSettings, PolicyTerms, TokenLoss, importance


class CovarianceLoss(PolicyLossSettings):
    """Settings of a loss that selects tokens of the batch by their covariance."""

    def select(self, covariance: Tensor, generator: torch.Generator) -> Tensor:
        """Return the selected tokens, bool [N], of the batch's trained tokens with these covariances, float64 [N]."""
        raise NotImplementedError


class ClipCovLoss(CovarianceLoss):
    """Settings of policy loss `clip_cov`, with the paper's values."""

    fraction: float = Field(2e-4, gt=0, lt=1, description="share of the batch's tokens to leave out, at least one")
    min_covariance: float = Field(1.0, description="only tokens with a larger covariance are left out")
    max_covariance: float = Field(5.0, description="only tokens with a smaller covariance are left out")

    @model_validator(mode="after")
    def _check_bounds(self) -> ClipCovLoss:
        if self.min_covariance >= self.max_covariance:
            raise ValueError(f"min_covariance {self.min_covariance} is not below max_covariance {self.max_covariance}")
        return self

    def select(self, covariance: Tensor, generator: torch.Generator) -> Tensor:
        """Return a random draw among the tokens within the bounds."""
        # The order of the batch must not matter: the draw is among ranks, not among positions.
        order = covariance.argsort()
        inside = (covariance[order] > self.min_covariance) & (covariance[order] < self.max_covariance)
        candidates = order[inside]
        drawn = torch.randperm(len(candidates), generator=generator)[: _count(self.fraction, len(covariance))]
        return torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, candidates[drawn], True)


class KLCovLoss(CovarianceLoss):
    """Settings of policy loss `kl_cov`, with the paper's values for models of 7 billion parameters."""

    fraction: float = Field(2e-3, gt=0, lt=1, description="share of the batch's tokens with a penalty, at least one")
    coef: float = Field(1.0, gt=0, description="weight of the penalty")

    def select(self, covariance: Tensor, generator: torch.Generator) -> Tensor:
        """Return the tokens with the largest covariances."""
        highest = covariance.argsort(descending=True, stable=True)[: _count(self.fraction, len(covariance))]
        return torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, highest, True)


def _count(fraction: float, n_tokens: int) -> int:
    return max(1, math.floor(fraction * n_tokens))


@POLICY_LOSSES.register("clip_cov")
def clip_cov(terms: PolicyTerms, settings: ClipCovLoss) -> TokenLoss:
    """Clip-Cov: −A·ρ, and 0 for the selected tokens (arXiv 2505.22617, section 4.2).

    Selected are ⌊fraction · N⌋ random tokens with a covariance within (min_covariance, max_covariance); see
    `select_tokens`.
    """
    assert terms.selected is not None, "PolicyUpdate.prepare selects the tokens"
    loss, selected = importance(terms, settings), terms.selected > 0
    return TokenLoss(torch.where(selected, 0.0, loss.loss), loss.ratio, selected)


@POLICY_LOSSES.register("kl_cov")
def kl_cov(terms: PolicyTerms, settings: KLCovLoss) -> TokenLoss:
    """KL-Cov: −A·ρ, plus coef·|log ρ| for the selected tokens (arXiv 2505.22617, section 4.2).

    Selected are the ⌊fraction · N⌋ tokens with the largest covariance; see `select_tokens`. |log ρ| is the estimate of
    the KL to the policy before the update in the paper's implementation.
    """
    assert terms.selected is not None, "PolicyUpdate.prepare selects the tokens"
    loss, selected = importance(terms, settings), terms.selected > 0
    penalty = settings.coef * (terms.logprobs - terms.old_logprobs).abs()
    return TokenLoss(loss.loss + torch.where(selected, penalty, 0.0), loss.ratio, selected)


def select_tokens(
    advantages: Tensor, logprobs: Tensor, loss_mask: Tensor, settings: CovarianceLoss, generator: torch.Generator
) -> Tensor:
    """Return the tokens that a covariance loss selects from a batch, bool [B, S].

    The covariance of a token is (log π − mean log π) · (A − mean A), with means over the N trained tokens of the batch
    (arXiv 2505.22617, section 4.2). π is the policy before the update: the selection of a batch depends on neither
    micro-batches nor earlier minibatches.

    Args:
        advantages: float [B, S].
        logprobs: float [B, S], logprobs of the sampled tokens under the policy before the update.
        loss_mask: [B, S].
        settings: settings of the loss.
        generator: random numbers of `clip_cov`.
    """
    trained = loss_mask > 0
    a, logp = advantages[trained].double(), logprobs[trained].double()
    selected = torch.zeros_like(trained)
    if a.numel():
        selected[trained] = settings.select((logp - logp.mean()) * (a - a.mean()), generator)
    return selected
