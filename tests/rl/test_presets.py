"""Presets mean exactly their papers, and each part of one can be overridden."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from pydantic import Field

from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageInputs, AdvantageSettings
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.preset_table import markdown_table, preset_rows
from archon.rl.algorithms.presets import DEFAULT_PRESET, PRESETS
from archon.schema.errors import ConfigError

DAPO_OVERLONG = {"mask_truncated": False, "penalty": 1.0, "buffer": 0.2}

GROUP = {
    "advantage": {"kind": "grpo", "eps": 1e-6},
    "aggregation": {"kind": "seq_mean_token_mean"},
    "ppo_epochs": 1,
    "minibatches": 1,
    "entropy_coef": 0.0,
}
CLIP = {"policy_loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}}
TOKEN_MEAN = {"aggregation": {"kind": "token_mean"}}
NO_KL = {"kl": {"kind": "k3", "coef": 0.0, "place": "loss"}}


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("grpo", GROUP | CLIP | {"kl": {"kind": "k3", "coef": 0.04, "place": "loss"}}),
        ("grpo_no_kl", GROUP | CLIP | NO_KL | TOKEN_MEAN),
        (
            "dr_grpo",
            GROUP
            | CLIP
            | NO_KL
            | {"advantage": {"kind": "dr_grpo"}, "aggregation": {"kind": "dr_grpo", "max_tokens": None}},
        ),
        (
            "rloo",
            {"advantage": {"kind": "rloo"}, "policy_loss": {"kind": "reinforce"}}
            | {"aggregation": {"kind": "seq_mean_token_sum"}}
            | {"kl": {"kind": "k1", "coef": 0.03, "place": "reward"}, "ppo_epochs": 1, "minibatches": 1},
        ),
        (
            "reinforce_pp",
            CLIP
            | TOKEN_MEAN
            | {"advantage": {"kind": "reinforce_pp", "eps": 1e-6}, "minibatches": 1}
            | {"kl": {"kind": "k1", "coef": 0.01, "place": "reward"}},
        ),
        (
            "ppo",
            CLIP
            | TOKEN_MEAN
            | {"advantage": {"kind": "gae", "gamma": 1.0, "lam": 0.95}, "value_clip": 0.2}
            | {"kl": {"kind": "k1", "coef": 0.02, "place": "reward"}, "ppo_epochs": 1, "minibatches": 8},
        ),
        (
            "dapo",
            GROUP
            | NO_KL
            | TOKEN_MEAN
            | {"policy_loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}}
            | {"zero_variance_groups": "resample", "overlong": DAPO_OVERLONG, "minibatches": 16},
        ),
        (
            "gspo",
            GROUP
            | NO_KL
            | {"policy_loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}}
            | {"minibatches": 4},
        ),
        (
            "luspo",
            GROUP
            | NO_KL
            | {"policy_loss": {"kind": "gspo", "clip_low": 2e-3, "clip_high": 2.5e-3, "dual_clip": None}}
            | {"aggregation": {"kind": "seq_mean_token_sum"}},
        ),
        ("gdpo", GROUP | CLIP | NO_KL | TOKEN_MEAN | {"advantage": {"kind": "gdpo", "eps": 1e-6, "weights": {}}}),
        ("maxrl", CLIP | NO_KL | TOKEN_MEAN | {"advantage": {"kind": "maxrl"}}),
        (
            "dppo",
            GROUP
            | NO_KL
            | TOKEN_MEAN
            | {"policy_loss": {"kind": "dppo", "divergence": "tv", "delta_low": 0.2, "delta_high": 0.28}},
        ),
        (
            "opsm",
            GROUP | NO_KL | {"policy_loss": CLIP["policy_loss"] | {"kind": "opsm", "max_drift": 0.5}},
        ),
        (
            "clip_cov",
            GROUP
            | NO_KL
            | TOKEN_MEAN
            | {"zero_variance_groups": "drop", "minibatches": 8}
            | {"policy_loss": {"kind": "clip_cov", "fraction": 2e-4, "min_covariance": 1.0, "max_covariance": 5.0}},
        ),
        (
            "kl_cov",
            GROUP
            | NO_KL
            | TOKEN_MEAN
            | {"zero_variance_groups": "drop", "minibatches": 8}
            | {"policy_loss": {"kind": "kl_cov", "fraction": 2e-3, "coef": 1.0}},
        ),
        (
            "cispo",
            GROUP | NO_KL | TOKEN_MEAN | {"policy_loss": {"kind": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
        ),
        ("sapo", GROUP | NO_KL | {"policy_loss": {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}}),
        ("m2po", GROUP | NO_KL | TOKEN_MEAN | {"policy_loss": {"kind": "m2po", "max_second_moment": 0.04}}),
        ("lite_ppo", GROUP | CLIP | NO_KL | TOKEN_MEAN | {"advantage": {"kind": "lite_ppo", "eps": 1e-6}}),
        (
            "raft",
            NO_KL
            | TOKEN_MEAN
            | {"advantage": {"kind": "raft", "best_only": False}, "policy_loss": {"kind": "reinforce"}},
        ),
        (
            "topr",
            NO_KL
            | {"advantage": {"kind": "reward"}, "policy_loss": {"kind": "topr"}}
            | {"aggregation": {"kind": "seq_mean_token_sum"}},
        ),
        (
            "asymre",
            NO_KL
            | {"advantage": {"kind": "asymre", "shift": -0.1}, "policy_loss": {"kind": "reinforce"}}
            | {"aggregation": {"kind": "seq_mean_token_sum"}},
        ),
        (
            "sppo",
            NO_KL | TOKEN_MEAN | {"advantage": {"kind": "dr_grpo"}, "policy_loss": {"kind": "sppo", "epsilon": 0.3}},
        ),
        (
            "rec",
            NO_KL
            | TOKEN_MEAN
            | {"advantage": {"kind": "dr_grpo"}}
            | {"policy_loss": {"kind": "rec", "sides": "one", "clip_low": 0.2, "clip_high": 0.2}},
        ),
        (
            "kpop",
            GROUP
            | NO_KL
            | {"policy_loss": CLIP["policy_loss"] | {"kind": "decoupled"}}
            | {"correction": {"kind": "kpop", "max_divergence": 0.1}},
        ),
        (
            "step_wise_grpo",
            GROUP
            | CLIP
            | {"advantage": {"kind": "step_wise_grpo", "eps": 1e-6, "per_step": False}}
            | {"kl": {"kind": "k3", "coef": 0.04, "place": "loss"}},
        ),
        (
            "gigpo",
            GROUP
            | CLIP
            | {"advantage": {"kind": "gigpo", "eps": 1e-6, "step_weight": 1.0, "gamma": 0.95, "normalize": True}}
            | {"kl": {"kind": "k3", "coef": 0.01, "place": "loss"}},
        ),
        (
            "distill",
            NO_KL | TOKEN_MEAN | {"advantage": {"kind": "distill"}, "policy_loss": {"kind": "importance"}},
        ),
        (
            "mix",
            GROUP
            | {"policy_loss": CLIP["policy_loss"] | {"kind": "mix", "mu": 0.1}}
            | {"kl": {"kind": "k3", "coef": 0.04, "place": "loss"}},
        ),
        (
            "chord",
            GROUP
            | NO_KL
            | TOKEN_MEAN
            | {
                "policy_loss": CLIP["policy_loss"]
                | {"kind": "chord", "phi": True, "mu_peak": 0.1, "mu_valley": 0.1}
                | {"mu_warmup_steps": 0, "mu_decay_steps": 0}
            },
        ),
    ],
)
def test_preset_means_exactly_its_paper(preset: str, parts: dict[str, object]) -> None:
    config = AlgorithmConfig(preset=preset).model_dump()
    assert {name: config[name] for name in parts} == parts
    if preset not in ("dapo",):
        assert config["overlong"]["penalty"] == 0
        assert config["zero_variance_groups"] == parts.get("zero_variance_groups", "keep")
    assert config["rewards"] == {"bias": 0.0, "scale": 1.0, "clip": None}
    assert config["correction"] == parts.get("correction", {"kind": "none"})


def test_every_preset_is_checked_above() -> None:
    assert set(PRESETS) == {
        *("grpo", "grpo_no_kl", "dr_grpo", "rloo", "reinforce_pp", "ppo", "dapo", "gspo", "cispo", "sapo", "m2po"),
        *(
            "lite_ppo",
            "raft",
            "topr",
            "asymre",
            "sppo",
            "rec",
            "luspo",
            "maxrl",
            "dppo",
            "opsm",
            "clip_cov",
            "kl_cov",
            "gdpo",
            "kpop",
            "step_wise_grpo",
            "gigpo",
            "distill",
            "mix",
            "chord",
        ),
    }


def test_every_part_of_a_preset_can_be_overridden_and_unknown_ones_are_named() -> None:
    changed = AlgorithmConfig.parse({"preset": "grpo", "kl": {"coef": 0.0}, "aggregation": "token_mean"})
    assert changed.kl.model_dump() == {"kind": "k3", "coef": 0.0, "place": "loss"}
    assert changed.aggregation.kind == "token_mean"
    with pytest.raises(ConfigError, match="unknown preset 'grop', did you mean 'grpo'"):
        AlgorithmConfig.parse({"preset": "grop"})
    with pytest.raises(ConfigError, match="preset: got 5, input should be a valid string"):
        AlgorithmConfig.parse({"preset": 5})


@pytest.mark.parametrize(
    ("given", "policy_loss"),
    [
        ({"clip_low": 0.1}, {"kind": "ppo", "clip_low": 0.1, "clip_high": 0.28, "dual_clip": None}),
        ("ppo", {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}),
        # Another method has its own paper's values, not those of the preset's.
        ("gspo", {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}),
        ({"kind": "cispo", "clip_high": 2.0}, {"kind": "cispo", "clip_low": 1.0, "clip_high": 2.0}),
        ("reinforce", {"kind": "reinforce"}),
    ],
)
def test_settings_complete_the_presets_method_and_another_method_replaces_it(
    given: object, policy_loss: dict[str, object]
) -> None:
    config = AlgorithmConfig.parse({"preset": "dapo", "policy_loss": given})
    assert config.model_dump()["policy_loss"] == policy_loss
    assert AlgorithmConfig.parse(config.model_dump(mode="json")).model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy_loss": {"tau_positive": 2.0}}, "policy_loss: unknown key 'tau_positive'"),
        ({"policy_loss": {"kind": "sapo", "tau_positiv": 2.0}}, "policy_loss: .* did you mean 'tau_positive'"),
        ({"policy_loss": {"kind": "ppo", "clip_low": 2.0}}, "policy_loss.clip_low: got 2.0, input should be less than"),
        ({"advantage": "gpro"}, "advantage: unknown advantage 'gpro', did you mean 'grpo'"),
        ({"advantage": 3}, "advantage: got 3, expected a name, or a mapping with `kind`"),
        ({"advantage": {"kind": "math.pi"}}, "advantage 'math.pi' is 3.14.*, expected a function"),
        ({"correction": {"kind": "icepop", "min_ratio": 3}}, "correction: min_ratio 3.0 is not below max_ratio 2.0"),
    ],
)
def test_a_method_that_cannot_be_is_named_in_one_line(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        AlgorithmConfig.parse(given)
    assert "\n" not in str(caught.value)


def test_table_of_presets_says_how_each_differs_from_the_default() -> None:
    """The settings of a row, over the default preset, are the row's preset."""
    rows = preset_rows()
    assert {row.name for row in rows} == set(PRESETS) and rows[0].name == DEFAULT_PRESET and not rows[0].settings
    for row in rows:
        made = AlgorithmConfig.parse(yaml.safe_load(f"{{{row.settings}}}") | {"preset": DEFAULT_PRESET}).model_dump()
        assert made | {"preset": row.name} == AlgorithmConfig(preset=row.name).model_dump(), row.name
        assert row.source, row.name


def test_readme_holds_the_table_of_presets() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "tasks" / "rl.md"
    assert f"\n\n{markdown_table()}\n\n" in page.read_text(), "write markdown_table() into docs/tasks/rl.md"


class Margin(AdvantageSettings):
    is_group_relative = True
    margin: float = Field(0.1, ge=0, description="lead that counts")


def own_advantage(inputs: AdvantageInputs, settings: Margin) -> torch.Tensor:
    return inputs.broadcast_to_tokens(inputs.totals - settings.margin)


def test_an_advantage_of_ones_own_has_settings_of_its_own() -> None:
    path = f"{__name__}.own_advantage"
    given = AlgorithmConfig.parse({"advantage": {"kind": path, "margin": 0.25}})
    assert isinstance(given.advantage, Margin) and given.advantage.is_group_relative
    inputs = AdvantageInputs(torch.tensor([1.0]), torch.tensor([0]), torch.ones(1, 2))
    assert ADVANTAGES[path](inputs, given.advantage).tolist() == [[0.75, 0.75]]
    assert AlgorithmConfig.parse({"advantage": path}).model_dump()["advantage"] == {"kind": path, "margin": 0.1}
    with pytest.raises(ConfigError, match="advantage: unknown key 'margn', did you mean 'margin'"):
        AlgorithmConfig.parse({"advantage": {"kind": path, "margn": 0.25}})
