"""Presets: one name sets every part of an algorithm to its paper's values; each part can be overridden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.rl.algorithms.registry import Registry


class Preset(dict[str, Any]):
    """Values of an algorithm's fields.

    Attributes:
        source: paper or report of the values.
        default_of: frameworks whose default is this method, with coefficients of their own; empty: unknown.
        needs: requirements on the run besides a reward.
    """

    def __init__(self, values: Mapping[str, Any], source: str, default_of: str = "", needs: str = "") -> None:
        super().__init__(values)
        self.source, self.default_of, self.needs = source, default_of, needs


PRESETS: Registry[dict[str, Any]] = Registry("preset")


def _register(name: str, values: Mapping[str, Any], source: str, default_of: str = "", needs: str = "") -> None:
    PRESETS.register(name)(Preset(values, source, default_of, needs))


# DeepSeekMath (arXiv 2402.03300), equation 3: clipped ratio, mean over each answer's tokens and then over answers, KL
# to the reference in the loss (equation 4, the k3 estimator) with beta 0.04, advantages normalized by the group's mean
# and standard deviation (section 4.1.2), one update per batch of answers (section 4.2). The paper states neither the
# clip range nor the epsilon of the standard deviation: 0.2 is PPO's (arXiv 1707.06347), and 1e-6 only prevents a
# division by zero. Groups of equal reward are kept, as in the paper.
GRPO: dict[str, Any] = {
    "advantage": {"kind": "grpo", "eps": 1e-6},
    "policy_loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2},
    "kl": {"kind": "k3", "coef": 0.04, "place": "loss"},
    "correction": {"kind": "none"},
    "aggregation": {"kind": "seq_mean_token_mean"},
    "overlong": {"penalty": 0.0},
    "entropy_coef": 0.0,
    "zero_variance_groups": "keep",
    "ppo_epochs": 1,
    "minibatches": 1,
}
_register("grpo", GRPO, "DeepSeekMath, arXiv 2402.03300", default_of="SkyRL")
NO_KL: dict[str, Any] = {"kl": {"coef": 0.0}}
TOKEN_MEAN: dict[str, Any] = {"aggregation": {"kind": "token_mean"}}

# GRPO without KL, and the mean over all tokens: the defaults of TRL's GRPOTrainer (beta 0, loss type dapo).
DEFAULT_PRESET = "grpo_no_kl"
_register(DEFAULT_PRESET, GRPO | NO_KL | TOKEN_MEAN, "DeepSeekMath, arXiv 2402.03300, without its KL", default_of="TRL")

# Dr. GRPO (arXiv 2503.20783), section 3.2: no division by the standard deviation or by the answer's length. No KL, as
# in its experiments (section 3.3).
_register(
    "dr_grpo",
    GRPO | NO_KL | {"advantage": {"kind": "dr_grpo"}, "aggregation": {"kind": "dr_grpo"}},
    "Dr. GRPO, arXiv 2503.20783",
)

# RLOO (arXiv 2402.14740): REINFORCE on whole answers with a leave-one-out baseline, KL in the reward with beta 0.03 as
# in its experiments on summaries.
_register(
    "rloo",
    GRPO
    | {
        "advantage": {"kind": "rloo"},
        "policy_loss": {"kind": "reinforce"},
        "aggregation": {"kind": "seq_mean_token_sum"},
        "kl": {"kind": "k1", "coef": 0.03, "place": "reward"},
    },
    "RLOO, arXiv 2402.14740",
)

# REINFORCE++ (arXiv 2501.03262): clipped ratio, every token's reward to go normalized over the batch, the KL token by
# token in the reward, with 0.01 as in its experiments.
_register(
    "reinforce_pp",
    GRPO
    | TOKEN_MEAN
    | {
        "advantage": {"kind": "reinforce_pp", "eps": 1e-6},
        "kl": {"kind": "k1", "coef": 0.01, "place": "reward"},
    },
    "REINFORCE++, arXiv 2501.03262",
)

# PPO (arXiv 1707.06347) as InstructGPT runs it (arXiv 2203.02155, appendix C.4): clip 0.2 for ratio and value, no
# discount, KL 0.02 in the reward, one pass of 8 minibatches; lambda 0.95 as in Ziegler et al. (arXiv 1909.08593,
# section 2.2). Advantages are not normalized a second time.
_register(
    "ppo",
    GRPO
    | TOKEN_MEAN
    | {
        "advantage": {"kind": "gae", "gamma": 1.0, "lam": 0.95},
        "value_clip": 0.2,
        "kl": {"kind": "k1", "coef": 0.02, "place": "reward"},
        "minibatches": 8,
    },
    "PPO, arXiv 1707.06347; InstructGPT, arXiv 2203.02155",
    default_of="verl, OpenRLHF",
    needs="`critic`",
)

# DAPO (arXiv 2503.14476), section 4.1: clip 0.2 below and 0.28 above, mean over all tokens, groups of equal reward
# resampled, no KL, and the soft penalty of answers in the last fifth of the length allowed (4,096 of
# 20,480 tokens); 16 optimizer steps a batch of answers.
_register(
    "dapo",
    GRPO
    | NO_KL
    | TOKEN_MEAN
    | {
        "policy_loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "overlong": {"penalty": 1.0, "buffer": 0.2},
        "zero_variance_groups": "resample",
        "minibatches": 16,
    },
    "DAPO, arXiv 2503.14476",
)

# GSPO (arXiv 2507.18071), section 5.1: the sequence's ratio, clipped by 3e-4 below and 4e-4 above, four minibatches.
_register(
    "gspo",
    GRPO | NO_KL | {"policy_loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "minibatches": 4},
    "GSPO, arXiv 2507.18071",
)

# LUSPO (arXiv 2602.05261), section 5.1: GSPO with each answer's loss times its length, clipped by 2e-3 and 2.5e-3.
_register(
    "luspo",
    GRPO
    | NO_KL
    | {
        "policy_loss": {"kind": "gspo", "clip_low": 2e-3, "clip_high": 2.5e-3},
        "aggregation": {"kind": "seq_mean_token_sum"},
    },
    "LUSPO, arXiv 2602.05261",
)

# GDPO (arXiv 2601.05242): each part of the reward normalized in its group, the sum divided by its deviation over the
# batch; otherwise the defaults of TRL's GRPOTrainer, which its authors extended.
_register(
    "gdpo",
    GRPO | NO_KL | TOKEN_MEAN | {"advantage": {"kind": "gdpo", "eps": 1e-6, "weights": {}}},
    "GDPO, arXiv 2601.05242",
    needs="a reward with parts",
)

# MaxRL (arXiv 2602.02710): advantages relative to the group's mean, no KL, mean over all tokens.
_register(
    "maxrl",
    GRPO | NO_KL | TOKEN_MEAN | {"advantage": {"kind": "maxrl"}},
    "MaxRL, arXiv 2602.02710",
    needs="rewards of 0 and 1",
)

# DPPO (arXiv 2602.04879) with the binary total variation: limits 0.2 and 0.28 as in TRL's example, no KL.
_register(
    "dppo",
    GRPO
    | NO_KL
    | TOKEN_MEAN
    | {"policy_loss": {"kind": "dppo", "divergence": "tv", "delta_low": 0.2, "delta_high": 0.28}},
    "DPPO, arXiv 2602.04879",
    default_of="prime-rl",
)

# Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): GRPO's loss without failed answers that are far off
# policy. The report states no limit; 0.5 nats a token is the value that TRL's documentation suggests to start with.
_register(
    "opsm",
    GRPO | NO_KL | {"policy_loss": {"kind": "opsm", "clip_low": 0.2, "clip_high": 0.2, "max_drift": 0.5}},
    "DeepSeek-V3.2, arXiv 2512.02556",
)

# Clip-Cov and KL-Cov (arXiv 2505.22617), section 4: GRPO's advantages without prompts of equal rewards, no KL to a
# reference, eight updates a batch of answers, mean over all tokens. Clip-Cov leaves out a random 2e-4 of the tokens,
# with covariances between 1 and 5. KL-Cov adds a KL to the policy before the update, with weight 1, to the 2e-3 of the
# tokens with the largest covariances (2e-4 for models of 32 billion parameters).
_COVARIANCE: dict[str, Any] = GRPO | NO_KL | TOKEN_MEAN | {"zero_variance_groups": "drop", "minibatches": 8}
_register(
    "clip_cov",
    _COVARIANCE | {"policy_loss": {"kind": "clip_cov", "fraction": 2e-4, "min_covariance": 1.0, "max_covariance": 5.0}},
    "Clip-Cov, arXiv 2505.22617",
)
_register(
    "kl_cov",
    _COVARIANCE | {"policy_loss": {"kind": "kl_cov", "fraction": 2e-3, "coef": 1.0}},
    "KL-Cov, arXiv 2505.22617",
)

# CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1): no lower bound, no KL, mean over all tokens. The paper does not
# state its upper bound; ScaleRL (arXiv 2510.13786) finds that the choice matters little around 4.
_register(
    "cispo",
    GRPO | NO_KL | TOKEN_MEAN | {"policy_loss": {"kind": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
    "MiniMax-M1, arXiv 2506.13585",
)

# SAPO (arXiv 2511.20347): the soft gate in place of the clip, 1.0 and 1.05, mean over tokens and then over answers.
_register(
    "sapo",
    GRPO | NO_KL | {"policy_loss": {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}},
    "SAPO, arXiv 2511.20347",
)

# M2PO (arXiv 2510.01161): unclipped ratio, tokens masked until its second moment is 0.04, mean over all tokens.
_register(
    "m2po",
    GRPO | NO_KL | TOKEN_MEAN | {"policy_loss": {"kind": "m2po", "max_second_moment": 0.04}},
    "M2PO, arXiv 2510.01161",
)

# Lite PPO (arXiv 2508.08221): PPO's loss without a critic, with the mean of the group, the deviation of the batch, and
# the mean over all tokens; nothing else.
_register(
    "lite_ppo",
    GRPO | NO_KL | TOKEN_MEAN | {"advantage": {"kind": "lite_ppo", "eps": 1e-6}},
    "Lite PPO, arXiv 2508.08221",
)

# RAFT (arXiv 2504.11343, section 3): log-likelihood of all successes only. `advantage.best_only`
# keeps only each prompt's best answers, as in arXiv 2304.06767; `policy_loss: ppo` makes it RAFT++.
_register(
    "raft",
    GRPO
    | NO_KL
    | TOKEN_MEAN
    | {"advantage": {"kind": "raft", "best_only": False}, "policy_loss": {"kind": "reinforce"}},
    "RAFT, arXiv 2504.11343",
)

# TOPR (arXiv 2503.14286, equations 6 and 7): the reward itself, without a baseline, no KL, whole answers. Its rewards
# are 1 and -1; `rewards: {bias: -0.5, scale: 2}` makes them of 1 and 0.
_register(
    "topr",
    GRPO
    | NO_KL
    | {
        "advantage": {"kind": "reward"},
        "policy_loss": {"kind": "topr"},
        "aggregation": {"kind": "seq_mean_token_sum"},
    },
    "TOPR, arXiv 2503.14286",
    needs="rewards of 1 and -1",
)

# AsymRE (arXiv 2506.20520): REINFORCE on whole answers, group mean minus 0.1 as baseline, no ratio, no KL.
_register(
    "asymre",
    GRPO
    | NO_KL
    | {
        "advantage": {"kind": "asymre", "shift": -0.1},
        "policy_loss": {"kind": "reinforce"},
        "aggregation": {"kind": "seq_mean_token_sum"},
    },
    "AsymRE, arXiv 2506.20520",
)

# sPPO (arXiv 2108.05828) adapted to language models by Trinity-RFT (arXiv 2505.17826): the group mean replaces the
# critic, per-token loss, epsilon 0.3.
_register(
    "sppo",
    GRPO | NO_KL | TOKEN_MEAN | {"advantage": {"kind": "dr_grpo"}, "policy_loss": {"kind": "sppo", "epsilon": 0.3}},
    "sPPO, arXiv 2108.05828; Trinity-RFT, arXiv 2505.17826",
)

# REC (arXiv 2509.24203): REC-OneSide-NoIS, REINFORCE with the group mean as baseline. PPO's one-sided mask with
# epsilon 0.2 is the only regularization; mean over all tokens.
_register(
    "rec",
    GRPO
    | NO_KL
    | TOKEN_MEAN
    | {
        "advantage": {"kind": "dr_grpo"},
        "policy_loss": {"kind": "rec", "sides": "one", "clip_low": 0.2, "clip_high": 0.2},
    },
    "REC, arXiv 2509.24203",
)

# KPop (Guo et al. 2026): GRPO without KL, ratio to the trainer's policy before the update. Tokens are masked if the
# binary KL between trainer and generator exceeds 0.1.
_register(
    "kpop",
    GRPO
    | NO_KL
    | {
        "policy_loss": {"kind": "decoupled", "clip_low": 0.2, "clip_high": 0.2},
        "correction": {"kind": "kpop", "max_divergence": 0.1},
    },
    "KPop, Guo et al. 2026",
)

# Step-wise GRPO (rLLM; Trinity-RFT, arXiv 2505.17826): GRPO between runs; each step is trained as its own row.
_register(
    "step_wise_grpo",
    GRPO | {"advantage": {"kind": "step_wise_grpo", "eps": 1e-6, "per_step": False}},
    "rLLM; Trinity-RFT, arXiv 2505.17826",
    needs="a row for each answer of a run",
)

# GiGPO (arXiv 2505.10978, section 5 and appendix): GRPO's loss with KL 0.01, equal weights of run and step advantages,
# discount 0.95 per step.
_register(
    "gigpo",
    GRPO
    | {
        "advantage": {"kind": "gigpo", "eps": 1e-6, "step_weight": 1.0, "gamma": 0.95, "normalize": True},
        "kl": {"kind": "k3", "coef": 0.01, "place": "loss"},
    },
    "GiGPO, arXiv 2505.10978",
    needs="several turns",
)

# On-policy distillation (Lu and Thinking Machines Lab, "On-policy distillation", 2025): the reverse KL of each sampled
# token to the teacher as negative advantage, in an importance-weighted loss without clip; no reward, no other KL.
_register(
    "distill",
    GRPO | NO_KL | TOKEN_MEAN | {"advantage": {"kind": "distill"}, "policy_loss": {"kind": "importance"}},
    'Thinking Machines Lab, "On-policy distillation", 2025',
    needs="`teacher`",
)

# MIX (Trinity-RFT, arXiv 2505.17826): GRPO's objective, and the log-likelihood of expert answers with mu 0.1, its
# implementation's default; both are means over an answer's tokens, then over answers.
_register(
    "mix",
    GRPO | {"policy_loss": {"kind": "mix", "mu": 0.1, "clip_low": 0.2, "clip_high": 0.2}},
    "Trinity-RFT, arXiv 2505.17826",
    needs="`demonstrations`",
)

# CHORD (arXiv 2508.11408), its variant phi: GRPO without KL, and expert answers weighed token by token by p(1 - p),
# with a constant mu of 0.1; means over all tokens. Its variant mu decays from 0.9 to 0.05 over 200 steps without phi.
_register(
    "chord",
    GRPO
    | NO_KL
    | TOKEN_MEAN
    | {
        "policy_loss": {
            "kind": "chord",
            "mu_peak": 0.1,
            "mu_valley": 0.1,
            "phi": True,
            "clip_low": 0.2,
            "clip_high": 0.2,
        }
    },
    "CHORD, arXiv 2508.11408",
    needs="`demonstrations`",
)
