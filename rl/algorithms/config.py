"""Configuration of the objective: methods with their settings, filled in by a preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageSettings, OverlongConfig, RewardConfig
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.corrections import CORRECTIONS
from archon.rl.algorithms.kl import KLConfig
from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyLossSettings
from archon.rl.algorithms.presets import DEFAULT_PRESET, PRESETS
from archon.rl.algorithms.registry import MethodRegistry, MethodSettings
from archon.schema.config import StrictModel

METHODS: dict[str, MethodRegistry[Any]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "correction": CORRECTIONS,
    "aggregation": AGGREGATIONS,
}
"""Registry of each method field."""

ZeroVarianceGroups = Literal["keep", "drop", "resample"]
"""Treatment of groups of equal rewards."""


@dataclass(frozen=True)
class GroupRule:
    """Which groups are trained.

    Attributes:
        zero_variance: `keep` groups of equal rewards, `drop` them, or `resample` other prompts instead.
        by_part: a group has equal rewards only if every part of the rewards is equal.
    """

    zero_variance: ZeroVarianceGroups = "keep"
    by_part: bool = False


def _method_field(methods: MethodRegistry[Any]) -> tuple[BeforeValidator, MethodRegistry[Any]]:
    """Return the annotations of a field with the settings of one method; `--help` lists the methods."""
    return BeforeValidator(methods.parse), methods


class AlgorithmConfig(StrictModel):
    """RL objective. `preset` fills in unset fields; the defaults shown are the values of `grpo_no_kl`.

    A method is its name, or a mapping of `kind` and settings. Settings without `kind` override the preset's settings.
    """

    preset: str = Field(DEFAULT_PRESET, description="named algorithm that fills in unset fields")
    advantage: Annotated[SerializeAsAny[AdvantageSettings], *_method_field(ADVANTAGES)] = Field(
        default_factory=lambda: ADVANTAGES.parse("grpo"), description="advantage estimator"
    )
    policy_loss: Annotated[SerializeAsAny[PolicyLossSettings], *_method_field(POLICY_LOSSES)] = Field(
        default_factory=lambda: POLICY_LOSSES.parse("ppo"), description="per-token policy loss"
    )
    kl: KLConfig = Field(default_factory=KLConfig, description="KL to the reference model")
    correction: Annotated[SerializeAsAny[MethodSettings], *_method_field(CORRECTIONS)] = Field(
        default_factory=lambda: CORRECTIONS.parse("none"),
        description="token weights that correct the mismatch between trainer and generator",
    )
    aggregation: Annotated[SerializeAsAny[MethodSettings], *_method_field(AGGREGATIONS)] = Field(
        default_factory=lambda: AGGREGATIONS.parse("token_mean"),
        description="aggregation of token losses",
    )
    rewards: RewardConfig = Field(default_factory=RewardConfig, description="scaling and clipping of rewards")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="overlong and truncated answers")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    value_clip: float | None = Field(
        None, gt=0, description="clip range of the critic around its old values; null: not clipped"
    )
    zero_variance_groups: ZeroVarianceGroups = Field(
        "keep", description="groups of equal reward: keep, drop, or resample other prompts"
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over each batch of trajectories")
    minibatches: int = Field(1, ge=1, description="optimizer steps per pass")

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the ratio uses logprobs that the policy recomputes before the update."""
        return self.policy_loss.recomputes_logprobs or self.correction.kind != "none"

    @property
    def group_rule(self) -> GroupRule:
        """Which groups are trained."""
        return GroupRule(self.zero_variance_groups, self.advantage.needs_parts)

    @property
    def has_token_weights(self) -> bool:
        """Whether the policy loss weights tokens."""
        return self.recomputes_logprobs or self.policy_loss.uses_demonstrations

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(preset := data.get("preset", DEFAULT_PRESET), str):
            return PRESETS[preset] | {
                name: _override_preset(name, PRESETS[preset].get(name), value) for name, value in data.items()
            }
        return data

    @model_validator(mode="after")
    def _check_decoupled_correction(self) -> AlgorithmConfig:
        if self.policy_loss.kind == "decoupled" and self.correction.kind == "none":
            raise ValueError("policy_loss decoupled needs a correction; set correction=tis, or policy_loss=ppo")
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> AlgorithmConfig:
        if not self.advantage.needs_parts:
            return self
        kind = self.advantage.kind
        if self.rewards != RewardConfig():
            raise ValueError(
                f"advantage {kind} normalizes the parts of a reward, but `rewards` changes their sum; remove it, "
                "or set advantage.weights"
            )
        if self.kl.coef > 0 and self.kl.place == "reward":
            raise ValueError(f"advantage {kind} normalizes each part of a reward, which a KL is not; set kl.place=loss")
        return self


def _override_preset(name: str, preset_value: Any, value: Any) -> Any:
    """Return field `name`: `value` merged over the preset's value, unless it names another method."""
    if name in METHODS and isinstance(value, str):
        value = {"kind": value}
    if not isinstance(preset_value, dict) or not isinstance(value, dict):
        return value
    if name in METHODS and value.get("kind", preset_value["kind"]) != preset_value["kind"]:
        return value
    return preset_value | value
