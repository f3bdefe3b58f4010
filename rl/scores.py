"""What a set of scored answers says about a model: pass@k and means, with intervals over prompts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_95 = 1.959964
"""Standard errors on each side of a mean that make 95 % of a normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `prompts` prompts with its 95 % interval; `low` and `high` are NaN for a single prompt."""

    mean: float
    low: float
    high: float
    prompts: int


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return 1 − C(n − c, k) / C(n, k): the probability that at least one of k answers, drawn from n of which
    `correct` are right, is right (Chen et al. 2021, arXiv 2107.03374, equation 1; unbiased for n ≥ k)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} answers, and there are {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def proportion(values: Sequence[float]) -> Estimate:
    """Return the mean of one value from 0 to 1 a prompt, with Wilson's interval (Wilson 1927) for as many trials.

    It lies within 0 and 1, and is not empty where all prompts agree. Where values lie between 0 and 1 it is wider than
    needed, as their variance is at most that of trials.
    """
    n, p, z = len(values), statistics.fmean(values), NORMAL_95
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(center - reach, 0.0), min(center + reach, 1.0), n)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a prompt, and mean ± 1.96 standard errors.

    The standard error is that of the mean over prompts, from the unbiased variance (Miller 2024, arXiv 2411.00640,
    section 2): answers to one prompt are not independent, and are averaged first. Where all prompts agree it is 0.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan, len(values))
    reach = NORMAL_95 * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - reach, mean + reach, len(values))


def summarize(rewards: Sequence[Sequence[float]], ks: Sequence[int], pass_threshold: float) -> dict[str, Estimate]:
    """Return `reward` and each `pass@k` over prompts.

    Args:
        rewards: of each prompt's answers; prompts without any are left out, and of pass@k those with fewer than k.
        ks: numbers of answers.
        pass_threshold: the least reward of a right answer.
    """
    answered = [scores for scores in rewards if scores]
    found = {"reward": estimate([statistics.fmean(scores) for scores in answered])}
    for k in ks:
        right = [
            (len(scores), sum(score >= pass_threshold for score in scores)) for scores in answered if len(scores) >= k
        ]
        if right:
            found[f"pass@{k}"] = proportion([pass_at_k(n, correct, k) for n, correct in right])
    return found
