"""The configuration of an objective: which parts it is made of, and their numbers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from archon.rl.algorithms.advantages import ADVANTAGES
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.corrections import CORRECTIONS
from archon.rl.algorithms.kl import KLKind
from archon.rl.algorithms.losses import POLICY_LOSSES, RECOMPUTING_LOSSES
from archon.rl.algorithms.presets import PRESETS
from archon.schema.config import StrictModel

GroupsWithoutSpread = Literal["keep", "drop", "refill"]


class AlgorithmConfig(StrictModel):
    """The objective. `preset` fills every field that is not given; the defaults shown are those of `grpo`."""

    preset: str = Field("grpo", description="named algorithm whose parts fill whatever is not set here")
    advantage: str = Field("grpo", description="how rewards become advantages")
    advantage_eps: float = Field(1e-6, gt=0, description="added to the standard deviation that advantages are over")
    gae_gamma: float = Field(1.0, gt=0, le=1, description="discount of advantage gae, a token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="decay of advantage gae, a token")
    opmd_tau: float = Field(1.0, gt=0, description="temperature of advantage opmd, in units of reward")
    overlong_penalty: float = Field(0.0, ge=0, description="taken off the reward of an answer as long as allowed")
    overlong_buffer: float = Field(
        0.2, gt=0, le=1, description="last part of max_new_tokens over which that penalty grows from 0"
    )
    policy_loss: str = Field("ppo", description="per-token policy loss")
    clip_eps_low: float = Field(0.2, gt=0, le=1, description="the ratio is clipped below 1 - clip_eps_low")
    clip_eps_high: float = Field(0.2, gt=0, description="the ratio is clipped above 1 + clip_eps_high")
    dual_clip: float | None = Field(
        None, gt=1, description="a negative advantage weighs at most so many times; null: without bound"
    )
    sapo_tau_positive: float = Field(1.0, gt=0, description="temperature of sapo's gate for positive advantages")
    sapo_tau_negative: float = Field(1.05, gt=0, description="temperature of sapo's gate for negative advantages")
    m2_threshold: float = Field(0.04, gt=0, description="largest mean of (log ratio)² over the tokens m2po keeps")
    correction: str = Field(
        "none", description="for what trainer and generator disagree in: none | tis | icepop | sequence_tis"
    )
    correction_low: float = Field(0.5, ge=0, description="icepop leaves tokens out whose ratio is below")
    correction_high: float = Field(2.0, gt=0, description="bound of the corrected ratio from above")
    aggregation: str = Field("seq_mean_token_mean", description="how token losses become one number")
    length_budget: int | None = Field(
        None, ge=1, description="tokens that aggregation dr_grpo divides by; null: gconfig.max_new_tokens"
    )
    kl_kind: KLKind = Field("k3", description="estimator of the KL to the reference model")
    kl_coef: float = Field(0.04, ge=0, description="weight of that KL; positive needs `ref`")
    kl_in: Literal["loss", "reward"] = Field("loss", description="where the KL stands: in the loss or in the reward")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    value_clip: float | None = Field(
        None, gt=0, description="how far the critic's loss lets a value move in a step; null: any far"
    )
    groups_without_spread: GroupsWithoutSpread = Field(
        "keep", description="groups of equal reward: keep, drop, or drop and refill with other prompts"
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over each batch of trajectories")
    minibatches: int = Field(1, ge=1, description="optimiser steps a pass")

    @property
    def recomputes(self) -> bool:
        """Whether the policy scores the batch before it is updated: the ratio is then to those logprobs."""
        return self.policy_loss in RECOMPUTING_LOSSES or self.correction != "none"

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(preset := data.get("preset", "grpo"), str):
            return {**PRESETS[preset], **data}
        return data

    @model_validator(mode="after")
    def _parts_are_known(self) -> AlgorithmConfig:
        for table, name in (
            (ADVANTAGES, self.advantage),
            (POLICY_LOSSES, self.policy_loss),
            (AGGREGATIONS, self.aggregation),
            (CORRECTIONS, self.correction),
        ):
            table[name]
        if self.correction_low >= self.correction_high:
            raise ValueError(
                f"correction_low {self.correction_low} is not below correction_high {self.correction_high}"
            )
        if self.policy_loss == "decoupled" and self.correction == "none":
            raise ValueError(
                "policy_loss decoupled is weighted by a correction; set correction=tis, or policy_loss=ppo"
            )
        return self
