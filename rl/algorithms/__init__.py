"""Advantages, policy losses, KL estimators, aggregations and presets: pure functions, each with its source.

Losses work on a packed batch of documents: per-token tensors of shape [T], where index t is the prediction of token
t + 1, and a `loss_mask` that is 1 where that token is trained.

The modules named here register further methods when they are imported.
"""

from archon.rl.algorithms import baselines, distillation, mixed, off_policy, step_advantages

__all__ = ["baselines", "distillation", "mixed", "off_policy", "step_advantages"]
