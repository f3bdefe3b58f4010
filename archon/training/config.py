"""Configuration of SFT and preference training. Every field carries its default, its description and its unit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from archon.data.config import DatasetConfig
from archon.schema.config import (
    EngineConfig,
    MetricsConfig,
    StrictModel,
    follow_model,
    require_exportable,
)
from archon.training.bootstrap_config import BootstrapConfig


class CheckpointConfig(StrictModel):
    """When the whole state of training is saved."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end or when stopped")
    keep: int = Field(2, ge=1, description="checkpoints kept")


class SFTConfig(StrictModel):
    """Supervised fine-tuning of one model."""

    run_dir: str = Field(description="folder of the run: metrics, checkpoints, export")
    resume: bool = Field(False, description="go on from the run's newest checkpoint, if there is one")
    seed: int = Field(0, ge=0, lt=2**63, description="order of the data")
    total_steps: int | None = Field(None, ge=1, description="optimiser steps; null: as `epochs` says")
    epochs: int = Field(1, ge=1, description="passes over the data, where total_steps is null")
    batch_size: int = Field(32, ge=1, description="rows an optimiser step")
    model: EngineConfig = Field(description="the model")
    tokenizer: str | None = Field(None, description="tokenizer folder; null: the model's")
    train_data: DatasetConfig = Field(description="rows to train on")
    eval_data: DatasetConfig | None = Field(None, description="held-out rows")
    eval_every: int = Field(50, ge=0, description="steps between evaluations; 0: only after the last")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="where metrics are sent as well")
    bootstrap: BootstrapConfig | None = Field(None, description="make the model's checkpoint first, if it is not there")

    @model_validator(mode="after")
    def _ends_with_an_export(self) -> SFTConfig:
        require_exportable(self.model, "model")
        return self


class PreferenceConfig(SFTConfig):
    """Training of one model on pairs of answers."""

    loss: Literal["dpo", "ipo", "reward"] = Field(
        "dpo", description="dpo and ipo train a policy, reward a reward model"
    )
    beta: float = Field(0.1, gt=0, description="how strongly dpo and ipo hold the policy to the reference")
    ref: EngineConfig | None = Field(None, description="the reference of dpo and ipo; null: the model as it starts")

    @model_validator(mode="after")
    def _models_agree(self) -> PreferenceConfig:
        if self.loss == "reward":
            if self.ref is not None:
                raise ValueError("loss reward needs no reference model; remove `ref`")
            self.model.is_critic = True
            if "init_score" not in self.model.model_fields_set:
                self.model.init_score = True
            return self
        if self.model.is_critic:
            raise ValueError(f"model.is_critic is set, and loss {self.loss} trains a policy; choose loss=reward")
        if self.ref is None:
            self.ref = EngineConfig.model_validate({**self.model.model_dump(), "optimizer": None})
        else:
            follow_model(self.ref, self.model)
        return self
