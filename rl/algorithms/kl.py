"""Estimators of the KL divergence from one sampled token (J. Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from archon.schema.config import StrictModel

KLKind = Literal["k1", "k2", "k3"]


class KLConfig(StrictModel):
    """KL to the reference model."""

    kind: KLKind = Field("k3", description="estimator")
    coef: float = Field(0.0, ge=0, description="weight; above 0, a reference model is loaded")
    place: Literal["loss", "reward"] = Field("loss", description="add the KL to the loss or to the reward")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(π ‖ π_ref) per token from d = logπ − logπ_ref, with tokens drawn from π.

    - k1 = d: unbiased, high variance, may be negative.
    - k2 = d²/2: biased; its gradient is the gradient of the KL.
    - k3 = e^(−d) − 1 + d: unbiased, never negative (DeepSeekMath, arXiv 2402.03300, equation 4).
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    return (-d).expm1() + d


_SMALLEST = 1e-6
"""Probabilities are kept this far from 0 and 1."""


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return p log(p/q) + (1 − p) log((1 − p)/(1 − q)): the KL of drawing a token or not, with probability p or q."""
    p, q = (x.clamp(_SMALLEST, 1 - _SMALLEST) for x in (p, q))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
