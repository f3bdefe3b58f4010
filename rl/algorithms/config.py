"""The configuration of the objective: its methods with their settings, and what a preset fills in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageSettings, OverlongConfig, RewardConfig
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.corrections import CORRECTIONS
from archon.rl.algorithms.kl import KLConfig
from archon.rl.algorithms.losses import POLICY_LOSSES, PolicyLossSettings
from archon.rl.algorithms.presets import PRESETS
from archon.rl.algorithms.registry import MethodRegistry, MethodSettings
from archon.schema.config import StrictModel

METHODS: dict[str, MethodRegistry[Any]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "correction": CORRECTIONS,
    "aggregation": AGGREGATIONS,
}
"""The fields that choose a method, each with its registry."""

ZeroVarianceGroups = Literal["keep", "drop", "resample"]
"""What to do with groups whose answers all have the same reward."""


def _method_field(methods: MethodRegistry[Any]) -> tuple[BeforeValidator, MethodRegistry[Any]]:
    """Returns the annotations of a field that holds settings of one of `methods`, which `--help` lists."""
    return BeforeValidator(methods.parse), methods


class AlgorithmConfig(StrictModel):
    """The objective. `preset` fills in what is not given; the defaults shown are those of `grpo`.

    A method is given by its name, or by `kind` and settings; settings without `kind` override those of the preset's
    method.
    """

    preset: str = Field("grpo", description="named algorithm whose parts fill whatever is not set here")
    advantage: Annotated[SerializeAsAny[AdvantageSettings], *_method_field(ADVANTAGES)] = Field(
        default_factory=lambda: ADVANTAGES.parse("grpo"), description="how rewards become advantages"
    )
    policy_loss: Annotated[SerializeAsAny[PolicyLossSettings], *_method_field(POLICY_LOSSES)] = Field(
        default_factory=lambda: POLICY_LOSSES.parse("ppo"), description="per-token policy loss"
    )
    kl: KLConfig = Field(default_factory=KLConfig, description="KL to the reference model")
    correction: Annotated[SerializeAsAny[MethodSettings], *_method_field(CORRECTIONS)] = Field(
        default_factory=lambda: CORRECTIONS.parse("none"),
        description="weight of a token by the mismatch between trainer and generator",
    )
    aggregation: Annotated[SerializeAsAny[MethodSettings], *_method_field(AGGREGATIONS)] = Field(
        default_factory=lambda: AGGREGATIONS.parse("seq_mean_token_mean"),
        description="how token losses become one number",
    )
    rewards: RewardConfig = Field(default_factory=RewardConfig, description="scaling and clipping of rewards")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="penalty of answers near the limit")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    value_clip: float | None = Field(
        None, gt=0, description="clip range of the critic's values around the old ones; null: not clipped"
    )
    zero_variance_groups: ZeroVarianceGroups = Field(
        "keep", description="groups of equal reward: keep, drop, or drop and resample from other prompts"
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over each batch of trajectories")
    minibatches: int = Field(1, ge=1, description="optimizer steps a pass")

    renamed: ClassVar[Mapping[str, str]] = {
        "advantage_eps": "algorithm.advantage.eps",
        "gae_gamma": "algorithm.advantage.gamma, of kind gae",
        "gae_lambda": "algorithm.advantage.lam, of kind gae",
        "opmd_tau": "algorithm.advantage.tau, of kind opmd",
        "overlong_penalty": "algorithm.overlong.penalty",
        "overlong_buffer": "algorithm.overlong.buffer",
        "clip_eps_low": "algorithm.policy_loss.clip_low",
        "clip_eps_high": "algorithm.policy_loss.clip_high",
        "dual_clip": "algorithm.policy_loss.dual_clip",
        "sapo_tau_positive": "algorithm.policy_loss.tau_positive, of kind sapo",
        "sapo_tau_negative": "algorithm.policy_loss.tau_negative, of kind sapo",
        "m2_threshold": "algorithm.policy_loss.max_second_moment, of kind m2po",
        "correction_low": "algorithm.correction.min_ratio, of kind icepop",
        "correction_high": "algorithm.correction.max_ratio",
        "length_budget": "algorithm.aggregation.max_tokens, of kind dr_grpo",
        "kl_kind": "algorithm.kl.kind",
        "kl_coef": "algorithm.kl.coef",
        "kl_in": "algorithm.kl.place",
        "groups_without_spread": "algorithm.zero_variance_groups (keep, drop or, in place of refill, resample)",
    }

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the policy scores the batch before the update, and the ratio is taken to those logprobs."""
        return self.policy_loss.recomputes_logprobs or self.correction.kind != "none"

    @property
    def has_token_weights(self) -> bool:
        """Whether tokens have weights of their own in the policy loss."""
        return self.recomputes_logprobs or self.policy_loss.uses_demonstrations

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(preset := data.get("preset", "grpo"), str):
            return PRESETS[preset] | {
                name: _override_preset(name, PRESETS[preset].get(name), value) for name, value in data.items()
            }
        return data

    @model_validator(mode="after")
    def _check_decoupled_correction(self) -> AlgorithmConfig:
        if self.policy_loss.kind == "decoupled" and self.correction.kind == "none":
            raise ValueError(
                "policy_loss decoupled is weighted by a correction; set correction=tis, or policy_loss=ppo"
            )
        return self


def _override_preset(name: str, filled: Any, value: Any) -> Any:
    """Returns the value of field `name`: `value` over the preset's, unless it names another method."""
    if name in METHODS and isinstance(value, str):
        value = {"kind": value}
    if not isinstance(filled, dict) or not isinstance(value, dict):
        return value
    if name in METHODS and value.get("kind", filled["kind"]) != filled["kind"]:
        return value
    return filled | value
