"""Policy losses that leave out tokens or answers for which the policy has moved too far from the generator's."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from archon.rl.algorithms.kl import binary_kl
from archon.rl.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLossSettings,
    PolicyTerms,
    PPOLoss,
    TokenLoss,
    importance,
    mean_by_document,
    ppo,
)


class DPPOLoss(PolicyLossSettings):
    """Settings of policy loss `dppo`."""

    divergence: Literal["tv", "kl"] = Field(
        "tv", description="tv: |π(a) − μ(a)|, the total variation of drawing the token or not; kl: its KL(μ ‖ π)"
    )
    delta_low: float = Field(0.2, gt=0, description="largest divergence of a token that becomes less likely")
    delta_high: float = Field(0.28, gt=0, description="largest divergence of a token that becomes more likely")


@POLICY_LOSSES.register("dppo")
def dppo(terms: PolicyTerms, settings: DPPOLoss) -> TokenLoss:
    """DPPO: −A·ρ, without the tokens that leave the trust region (arXiv 2602.04879).

    A token leaves it if A raises a ratio above 1, or lowers one below 1, and the divergence is above its limit. PPO
    limits the ratio instead, which leaves out unlikely tokens after a small change of their probability.
    """
    new, old = terms.logprobs.detach().double().exp(), terms.old_logprobs.double().exp()
    divergence = (new - old).abs() if settings.divergence == "tv" else binary_kl(old, new)
    rises = (terms.advantages > 0) & (new > old) & (divergence > settings.delta_high)
    falls = (terms.advantages < 0) & (new < old) & (divergence > settings.delta_low)
    loss, outside = importance(terms, settings), rises | falls
    return TokenLoss(torch.where(outside, 0.0, loss.loss), loss.ratio, outside)


class OPSMLoss(PPOLoss):
    """Settings of policy loss `opsm`. The report does not state its limit."""

    max_drift: float = Field(
        0.5,
        gt=0,
        description="largest mean of log π_old − log π over the tokens of an answer with a negative advantage",
    )


@POLICY_LOSSES.register("opsm")
def opsm(terms: PolicyTerms, settings: OPSMLoss) -> TokenLoss:
    """Off-policy sequence masking: PPO's loss, without failed answers that are far off policy.

    Source: DeepSeek-V3.2, arXiv 2512.02556. Left out are tokens with A < 0 of answers for which the mean of
    log π_old − log π is above max_drift.
    """
    drift = terms.old_logprobs - terms.logprobs.detach()
    drift = mean_by_document(drift, terms.mask, terms.documents, terms.n_documents)[terms.documents]
    loss, outside = ppo(terms, settings), (terms.advantages < 0) & (drift > settings.max_drift)
    return TokenLoss(torch.where(outside, 0.0, loss.loss), loss.ratio, loss.clipped | outside)
