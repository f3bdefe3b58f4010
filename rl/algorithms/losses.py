"""Policy losses: per-token values before masking and aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.aggregation import sums_by_document
from archon.rl.algorithms.registry import MethodRegistry, MethodSettings


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of a policy loss for the T tokens of a micro-batch.

    Attributes:
        logprobs: float [T], logprobs under the trained policy, with gradient.
        old_logprobs: float [T], denominator of the ratio; equal to `logprobs` outside the mask.
        advantages: float [T].
        mask: float [T], 1 at trained tokens.
        documents: int [T], trajectory of each token, from 0 to `n_documents` − 1.
        n_documents: number of trajectories.
        demonstrations: [T], 1 at tokens of demonstrations; None without demonstrations.
        selected: [T], 1 at tokens that a covariance loss selected from the batch; None for other losses.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    documents: Tensor
    n_documents: int
    demonstrations: Tensor | None = None
    selected: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """Importance ratio π / π_old, [T], with gradient."""
        return (self.logprobs - self.old_logprobs).exp()


class TokenLoss(NamedTuple):
    """Per-token policy loss [T], the ratio π/π_old [T], and whether the loss was clipped [T] (bool)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class PolicyLossSettings(MethodSettings):
    """Settings of a policy loss.

    Attributes:
        recomputes_logprobs: whether the policy recomputes logprobs before the update.
        uses_demonstrations: whether it also trains on demonstrations.
    """

    recomputes_logprobs: ClassVar[bool] = False
    uses_demonstrations: ClassVar[bool] = False


PolicyLossFn = Callable[[PolicyTerms, Any], TokenLoss]
POLICY_LOSSES: MethodRegistry[PolicyLossFn] = MethodRegistry("policy loss", PolicyLossSettings)


def mean_by_document(values: Tensor, mask: Tensor, documents: Tensor, n_documents: int) -> Tensor:
    """Return the mean over each trajectory's trained tokens, [n_documents]; 0 without trained tokens."""
    total, count = (sums_by_document(x, documents, n_documents) for x in (values * mask, mask))
    return total / count.clamp(min=1)


def clipped_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """Return max(−A·ρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high)) (PPO, arXiv 1707.06347, equation 7, negated).

    PPO uses equal bounds, DAPO separate ones (arXiv 2503.14476, equation 10). `dual_clip` c bounds the loss by −c·A
    for negative A (arXiv 1912.09729, equation 7).
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, is_clipped = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, is_clipped = torch.where(beyond, bound, loss), is_clipped | beyond
    return TokenLoss(loss, ratio, is_clipped)


class ClipSettings(PolicyLossSettings):
    """Bounds of the ratio, with PPO's defaults."""

    clip_low: float = Field(0.2, gt=0, le=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="the ratio is clipped above 1 + clip_high")


class PPOLoss(ClipSettings):
    """Settings of policy losses `ppo` and `decoupled`."""

    dual_clip: float | None = Field(None, gt=1, description="largest ratio for negative advantages; null: unbounded")


@POLICY_LOSSES.register("decoupled")
@POLICY_LOSSES.register("ppo")
def ppo(terms: PolicyTerms, settings: PPOLoss) -> TokenLoss:
    """PPO: clipped loss (`clipped_loss`).

    `decoupled` takes the ratio to π_prox, the policy before the update, and needs a correction for
    π_prox / π_behave (AReaL, arXiv 2505.24298, section 5.2).
    """
    return clipped_loss(terms.ratio, terms.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)


class GSPOLoss(PPOLoss):
    """Settings of policy loss `gspo`, with the paper's defaults (arXiv 2507.18071, section 5.1)."""

    clip_low: float = Field(3e-4, gt=0, le=1, description="the sequence's ratio is clipped below 1 - clip_low")
    clip_high: float = Field(4e-4, gt=0, description="the sequence's ratio is clipped above 1 + clip_high")


@POLICY_LOSSES.register("gspo")
def gspo(terms: PolicyTerms, settings: GSPOLoss) -> TokenLoss:
    """GSPO: clipped loss with the sequence ratio s = exp(mean_t log ρ_t) (arXiv 2507.18071).

    The gradient is the paper's GSPO-token variant.
    """
    log_ratio = terms.logprobs - terms.old_logprobs
    mean = mean_by_document(log_ratio.detach(), terms.mask, terms.documents, terms.n_documents)
    ratio = (mean[terms.documents] + terms.logprobs - terms.logprobs.detach()).exp()
    return clipped_loss(ratio, terms.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)


class CISPOLoss(PolicyLossSettings):
    """Settings of policy loss `cispo`.

    The paper has no lower bound and does not state the upper bound; values around 4 work equally well (ScaleRL, arXiv
    2510.13786).
    """

    clip_low: float = Field(1.0, gt=0, le=1, description="the ratio's weight is clipped below 1 - clip_low")
    clip_high: float = Field(4.0, gt=0, description="the ratio's weight is clipped above 1 + clip_high")


@POLICY_LOSSES.register("cispo")
def cispo(terms: PolicyTerms, settings: CISPOLoss) -> TokenLoss:
    """CISPO: −sg[clip(ρ, 1 − clip_low, 1 + clip_high)]·A·log π (MiniMax-M1, arXiv 2506.13585, section 3.1)."""
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLoss(-weight * terms.advantages * terms.logprobs, ratio, weight != ratio)


class SAPOLoss(PolicyLossSettings):
    """Settings of policy loss `sapo`, with the paper's defaults."""

    tau_positive: float = Field(1.0, gt=0, description="temperature of the gate for positive advantages")
    tau_negative: float = Field(1.05, gt=0, description="temperature of the gate for negative advantages")


@POLICY_LOSSES.register("sapo")
def sapo(terms: PolicyTerms, settings: SAPOLoss) -> TokenLoss:
    """SAPO: −A·(4/τ)·σ(τ(ρ − 1)), with τ chosen by the sign of A (arXiv 2511.20347); nothing is clipped."""
    ratio = terms.ratio
    positive, negative = (ratio.new_full((), tau) for tau in (settings.tau_positive, settings.tau_negative))
    tau = torch.where(terms.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return TokenLoss(-terms.advantages * gate, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@POLICY_LOSSES.register("importance")
def importance(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLoss:
    """Importance-weighted policy gradient: −A·ρ, unclipped."""
    return TokenLoss(-terms.advantages * terms.ratio, terms.ratio, torch.zeros_like(terms.ratio, dtype=torch.bool))


class M2POLoss(PolicyLossSettings):
    """Settings of policy loss `m2po`, with the paper's default."""

    recomputes_logprobs = True
    max_second_moment: float = Field(0.04, gt=0, description="largest mean of (log ratio)² over the kept tokens")


@POLICY_LOSSES.register("m2po")
def m2po(terms: PolicyTerms, settings: M2POLoss) -> TokenLoss:
    """M2PO: −A·ρ (arXiv 2510.01161); `second_moment_mask` masks the tokens with the largest ratios."""
    return importance(terms, settings)


@POLICY_LOSSES.register("reinforce")
def reinforce(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLoss:
    """REINFORCE: −A·log π (Williams 1992); the ratio is only reported."""
    ratio = terms.ratio.detach()
    return TokenLoss(-terms.advantages * terms.logprobs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def second_moment_mask(log_ratio: Tensor, loss_mask: Tensor, threshold: float) -> Tensor:
    """Return the trained tokens that M2PO keeps, bool [B, S] (arXiv 2510.01161).

    The tokens with the largest (log ρ)² of the batch are masked until the mean of the kept tokens is at most
    `threshold`.

    Args:
        log_ratio: float [B, S], log π_prox − log π_behave.
        loss_mask: [B, S].
        threshold: largest mean (log ρ)².
    """
    trained = loss_mask > 0
    moments, order = log_ratio[trained].double().square().sort()
    means = moments.cumsum(0) / torch.arange(1, len(moments) + 1, device=moments.device)
    # Running means of sorted moments never decrease: the kept tokens are a prefix.
    kept = torch.zeros_like(trained)
    kept[trained] = torch.zeros_like(order, dtype=torch.bool).scatter(0, order, means <= threshold)
    return kept
