"""pass@k and mean rewards of scored answers, with confidence intervals over prompts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_95 = 1.959964
"""Half-width of the 95 % interval of a normal distribution, in standard errors."""


@dataclass(frozen=True)
class Estimate:
    """Mean over `prompts` prompts with its 95 % interval; `low` and `high` are NaN for a single prompt."""

    mean: float
    low: float
    high: float
    prompts: int


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return pass@k = 1 − C(n − correct, k) / C(n, k) for n answers (unbiased for n ≥ k).

    It is the probability that at least one of k answers is correct (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} answers, got {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def proportion(values: Sequence[float]) -> Estimate:
    """Return the mean of one value in [0, 1] per prompt, with Wilson's interval (Wilson 1927).

    The interval stays within [0, 1] and has a width even if all prompts agree. For fractional values it is
    conservative: their variance is at most the variance of Bernoulli trials.
    """
    n, p, z = len(values), statistics.fmean(values), NORMAL_95
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(center - reach, 0.0), min(center + reach, 1.0), n)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, with mean ± 1.96 standard errors.

    The standard error over prompts uses the unbiased variance (Miller 2024, arXiv 2411.00640, section 2). Answers to
    one prompt are dependent and are averaged first.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan, len(values))
    reach = NORMAL_95 * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - reach, mean + reach, len(values))


def summarize(rewards: Sequence[Sequence[float]], ks: Sequence[int], pass_threshold: float) -> dict[str, Estimate]:
    """Return `reward` and each `pass@k` over prompts.

    Args:
        rewards: rewards of each prompt's answers; prompts without answers are skipped, and for pass@k prompts with
            fewer than k answers.
        ks: values of k.
        pass_threshold: smallest reward of a correct answer.
    """
    answered = [scores for scores in rewards if scores]
    estimates = {"reward": estimate([statistics.fmean(scores) for scores in answered])}
    for k in ks:
        right = [
            (len(scores), sum(score >= pass_threshold for score in scores)) for scores in answered if len(scores) >= k
        ]
        if right:
            estimates[f"pass@{k}"] = proportion([pass_at_k(n, correct, k) for n, correct in right])
    return estimates
