"""Policy losses for off-policy answers: tapered, log-clipped and masked REINFORCE."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field

from archon.rl.algorithms.aggregation import sums_by_document
from archon.rl.algorithms.losses import POLICY_LOSSES, ClipSettings, PolicyLossSettings, PolicyTerms, TokenLoss


@POLICY_LOSSES.register("topr")
def topr(terms: PolicyTerms, settings: PolicyLossSettings) -> TokenLoss:
    """TOPR: −sg[α]·A·log π (arXiv 2503.14286, equation 7).

    α is 1 for A ≥ 0, else min(π/π_old, 1) of the whole answer: failures that the policy no longer samples are not
    pushed down further.
    """
    log_ratio = (terms.logprobs - terms.old_logprobs).detach()
    answer = sums_by_document(log_ratio * terms.mask, terms.documents, terms.n_documents)[terms.documents]
    failed = terms.advantages < 0
    weight = torch.where(failed, answer.clamp(max=0).exp(), 1.0)
    return TokenLoss(-weight * terms.advantages * terms.logprobs, terms.ratio.detach(), failed & (answer > 0))


class SPPOLoss(PolicyLossSettings):
    """Settings of policy loss `sppo`, with the bound of its published language-model implementation."""

    epsilon: float = Field(0.3, gt=0, description="the ratio is clipped below 1 / (1 + epsilon), above 1 + epsilon")


@POLICY_LOSSES.register("sppo")
def sppo(terms: PolicyTerms, settings: SPPOLoss) -> TokenLoss:
    """Softmax PPO: −A·log clip(ρ, 1/(1 + ε), 1 + ε) (Vaswani et al., arXiv 2108.05828, section 4).

    Tokens outside the bounds have no gradient for either sign of A.
    """
    bound = math.log1p(settings.epsilon)
    log_ratio = terms.logprobs - terms.old_logprobs
    clipped = log_ratio.clamp(-bound, bound)
    return TokenLoss(-terms.advantages * clipped, terms.ratio.detach(), (log_ratio != clipped).detach())


RING_LOW, RING_HIGH = 0.6, 2.0
"""Outer bounds of REC-Ring in its published implementation."""


class RECLoss(ClipSettings):
    """Settings of policy loss `rec`, with PPO's bounds."""

    sides: Literal["one", "two", "ring"] = Field(
        "one",
        description="masked tokens: one: outside the bounds and pushed further out; two: all outside the bounds; ring: "
        "as two, except tokens far outside that are pushed back",
    )


@POLICY_LOSSES.register("rec")
def rec(terms: PolicyTerms, settings: RECLoss) -> TokenLoss:
    """REC: −M·A·log π, with M = 0 for masked tokens, else 1 (arXiv 2509.24203, section 4.1).

    The variants are REC-OneSide-NoIS, REC-TwoSide-NoIS and REC-Ring-NoIS. REC-OneSide with importance weights has the
    gradient of `ppo`.
    """
    ratio = terms.ratio.detach()
    below, above = ratio < 1 - settings.clip_low, ratio > 1 + settings.clip_high
    out = below | above if settings.sides != "one" else torch.where(terms.advantages >= 0, above, below)
    if settings.sides == "ring":
        out = out & ~torch.where(terms.advantages >= 0, ratio <= 1 - RING_LOW, ratio >= 1 + RING_HIGH)
    return TokenLoss(-terms.advantages * terms.logprobs * ~out, ratio, out)
