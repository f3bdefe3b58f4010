"""Advantages, policy losses, KL estimators, aggregations and presets: pure functions, each with its source.

Losses work on a packed batch of documents: per-token tensors [T], with index t for the prediction of token t + 1, and
a `loss_mask` that is 1 if that token is trained.

Importing these modules registers their methods.
"""

from archon.rl.algorithms import (
    baselines,
    covariance,
    distillation,
    mixed,
    off_policy,
    reward_parts,
    step_advantages,
    trust_region,
)

__all__ = [
    "baselines",
    "covariance",
    "distillation",
    "mixed",
    "off_policy",
    "reward_parts",
    "step_advantages",
    "trust_region",
]
