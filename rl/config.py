"""Configuration of the RL and SFT trainers. Every field carries its default, its description and its unit."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from archon.rl.algorithms.advantages import ADVANTAGES
from archon.rl.algorithms.aggregation import AGGREGATIONS
from archon.rl.algorithms.losses import POLICY_LOSSES
from archon.rl.algorithms.presets import PRESETS
from archon.schema.config import StrictModel

GroupsWithoutSpread = Literal["keep", "drop", "refill"]


class AlgorithmConfig(StrictModel):
    """The objective. `preset` fills every field that is not given; the defaults shown are those of `grpo`."""

    preset: str = Field("grpo", description="named algorithm whose parts fill whatever is not set here")
    advantage: str = Field("grpo", description="how rewards become advantages")
    advantage_eps: float = Field(1e-6, gt=0, description="added to the group's standard deviation")
    policy_loss: str = Field("ppo", description="per-token policy loss")
    clip_eps_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 - clip_eps_low")
    clip_eps_high: float = Field(0.2, gt=0, description="the ratio is clipped above 1 + clip_eps_high")
    aggregation: str = Field("seq_mean_token_mean", description="how token losses become one number")
    kl_kind: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL to the reference model")
    kl_coef: float = Field(0.04, ge=0, description="weight of that KL in the loss; positive needs `ref`")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    groups_without_spread: GroupsWithoutSpread = Field(
        "keep", description="groups of equal reward: keep, drop, or drop and refill with other prompts"
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over each batch of trajectories")
    minibatches: int = Field(1, ge=1, description="optimiser steps a pass")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {**PRESETS[data.get("preset", "grpo")], **data}
        return data

    @model_validator(mode="after")
    def _parts_are_known(self) -> AlgorithmConfig:
        for table, name in (
            (ADVANTAGES, self.advantage),
            (POLICY_LOSSES, self.policy_loss),
            (AGGREGATIONS, self.aggregation),
        ):
            table[name]
        return self
