"""Policy losses for answers that another policy sampled: tapered, clipped in the logarithm, and masked REINFORCE."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field

from archon.rl.algorithms.aggregation import sums_by_document
from archon.rl.algorithms.losses import POLICY_LOSSES, ClipSettings, PolicyLossSettings, PolicyTerms, TokenLoss


@POLICY_LOSSES.register("topr")
def topr(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLoss:
    """−sg[α]·A·log π, with α = 1 where A ≥ 0, else min(π/π_old, 1) of the whole answer (TOPR, arXiv 2503.14286,
    equation 7): an answer that was a failure is pushed down only as far as the policy would still give it."""
    log_ratio = (terms.logprobs - terms.old_logprobs).detach()
    answer = sums_by_document(log_ratio * terms.mask, terms.documents, terms.n_documents)[terms.documents]
    failed = terms.advantages < 0
    weight = torch.where(failed, answer.clamp(max=0).exp(), 1.0)
    return TokenLoss(-weight * terms.advantages * terms.logprobs, terms.ratio.detach(), failed & (answer > 0))


class SPPOLoss(PolicyLossSettings):
    """The settings of policy loss `sppo`, with the bound of its published implementation for language models."""

    epsilon: float = Field(0.3, gt=0, description="the ratio is clipped below 1 / (1 + epsilon), above 1 + epsilon")


@POLICY_LOSSES.register("sppo")
def sppo(terms: PolicyTerms, settings: SPPOLoss) -> TokenLoss:
    """−A·log clip(ρ, 1/(1 + ε), 1 + ε) (sPPO, Vaswani et al., arXiv 2108.05828, section 4: the surrogate of a softmax
    policy). Outside the bounds a token has no gradient, whatever the sign of A."""
    bound = math.log1p(settings.epsilon)
    log_ratio = terms.logprobs - terms.old_logprobs
    clipped = log_ratio.clamp(-bound, bound)
    return TokenLoss(-terms.advantages * clipped, terms.ratio.detach(), (log_ratio != clipped).detach())


RING_LOW, RING_HIGH = 0.6, 2.0
"""Outer bounds of REC-Ring, those of its published implementation."""


class RECLoss(ClipSettings):
    """The settings of policy loss `rec`; the bounds are those of PPO, from which its paper starts."""

    sides: Literal["one", "two", "ring"] = Field(
        "one",
        description="tokens left out: those that would be pushed further, or all outside the bounds; ring: of these "
        "none that are far outside and would be pushed back",
    )


@POLICY_LOSSES.register("rec")
def rec(terms: PolicyTerms, settings: RECLoss) -> TokenLoss:
    """−M·A·log π, where M is 0 for the tokens left out, else 1 (REC-OneSide-NoIS, REC-TwoSide-NoIS and REC-Ring-NoIS,
    arXiv 2509.24203, section 4.1). With importance weights REC-OneSide has the gradient of `ppo`."""
    ratio = terms.ratio.detach()
    below, above = ratio < 1 - settings.clip_low, ratio > 1 + settings.clip_high
    out = below | above if settings.sides != "one" else torch.where(terms.advantages >= 0, above, below)
    if settings.sides == "ring":
        out = out & ~torch.where(terms.advantages >= 0, ratio <= 1 - RING_LOW, ratio >= 1 + RING_HIGH)
    return TokenLoss(-terms.advantages * terms.logprobs * ~out, ratio, out)
