"""Presets: one name sets every part of an algorithm as its paper has it; each part can then be overridden."""

from __future__ import annotations

from typing import Any

from archon.rl.algorithms.registry import Registry

PRESETS: Registry[dict[str, Any]] = Registry("preset")

# DeepSeekMath (arXiv 2402.03300), equation 3: clipped ratio, mean over each answer's own tokens and then over answers,
# KL to the reference in the loss (equation 4, the k3 estimator) with beta 0.04, advantages normalised by the group's
# mean and standard deviation (section 4.1.2), one update per batch of answers (section 4.2). The paper gives no epsilon
# for the clip and none beside the standard deviation: 0.2 is that of PPO (arXiv 1707.06347), on which it builds, and
# 1e-6 only keeps a division by zero away. Groups whose answers all score the same are kept, as there.
PRESETS.register("grpo")(
    {
        "advantage": "grpo",
        "advantage_eps": 1e-6,
        "policy_loss": "ppo",
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.2,
        "aggregation": "seq_mean_token_mean",
        "kl_kind": "k3",
        "kl_coef": 0.04,
        "entropy_coef": 0.0,
        "groups_without_spread": "keep",
        "ppo_epochs": 1,
        "minibatches": 1,
    }
)
