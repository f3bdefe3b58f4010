"""Presets mean exactly their papers, and each part of one can be overridden."""

from __future__ import annotations

import pytest

from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.presets import PRESETS
from archon.schema.errors import ConfigError

GROUP = {
    "advantage": "grpo",
    "advantage_eps": 1e-6,
    "aggregation": "seq_mean_token_mean",
    "ppo_epochs": 1,
    "minibatches": 1,
    "entropy_coef": 0.0,
}
CLIP = {"policy_loss": "ppo", "clip_eps_low": 0.2, "clip_eps_high": 0.2, "dual_clip": None}
NO_KL = {"kl_coef": 0.0}


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("grpo", GROUP | CLIP | {"kl_kind": "k3", "kl_coef": 0.04, "kl_in": "loss"}),
        ("dr_grpo", GROUP | CLIP | NO_KL | {"advantage": "dr_grpo", "aggregation": "dr_grpo"}),
        (
            "rloo",
            {"advantage": "rloo", "policy_loss": "reinforce", "aggregation": "seq_mean_token_sum"}
            | {"kl_in": "reward", "kl_kind": "k1", "kl_coef": 0.03, "ppo_epochs": 1, "minibatches": 1},
        ),
        (
            "reinforce_pp",
            CLIP
            | {"advantage": "reinforce_pp", "advantage_eps": 1e-6, "aggregation": "token_mean", "minibatches": 1}
            | {"kl_in": "reward", "kl_kind": "k1", "kl_coef": 0.01},
        ),
        (
            "ppo",
            CLIP
            | {"advantage": "gae", "gae_gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2, "aggregation": "token_mean"}
            | {"kl_in": "reward", "kl_kind": "k1", "kl_coef": 0.02, "ppo_epochs": 1, "minibatches": 8},
        ),
        (
            "dapo",
            GROUP
            | CLIP
            | NO_KL
            | {"clip_eps_high": 0.28, "aggregation": "token_mean", "groups_without_spread": "refill"}
            | {"overlong_penalty": 1.0, "overlong_buffer": 0.2, "minibatches": 16},
        ),
        (
            "gspo",
            GROUP
            | NO_KL
            | {"policy_loss": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4, "dual_clip": None, "minibatches": 4},
        ),
        (
            "cispo",
            GROUP
            | NO_KL
            | {"policy_loss": "cispo", "clip_eps_low": 1.0, "clip_eps_high": 4.0, "aggregation": "token_mean"},
        ),
        ("sapo", GROUP | NO_KL | {"policy_loss": "sapo", "sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}),
        ("m2po", GROUP | NO_KL | {"policy_loss": "m2po", "m2_threshold": 0.04, "aggregation": "token_mean"}),
    ],
)
def test_preset_means_exactly_its_paper(preset: str, parts: dict[str, object]) -> None:
    config = AlgorithmConfig(preset=preset).model_dump()
    assert {name: config[name] for name in parts} == parts
    if preset not in ("dapo",):
        assert config["overlong_penalty"] == 0 and config["groups_without_spread"] == "keep"
    assert config["correction"] == "none"


def test_every_preset_is_checked_above() -> None:
    assert set(PRESETS) == {
        *("grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "dapo", "gspo", "cispo", "sapo", "m2po")
    }


def test_every_part_of_a_preset_can_be_overridden_and_unknown_ones_are_named() -> None:
    assert AlgorithmConfig(preset="grpo", kl_coef=0.0, aggregation="token_mean").kl_coef == 0.0
    with pytest.raises(ConfigError, match="unknown preset 'grop', did you mean 'grpo'"):
        AlgorithmConfig.parse({"preset": "grop"})
    with pytest.raises(ConfigError, match="preset: got 5, input should be a valid string"):
        AlgorithmConfig.parse({"preset": 5})
