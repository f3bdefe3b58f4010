"""Configuration of `archon serve-training`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from archon.schema.config import EXPANDED, ComputeDtype, StrictModel


class ServeTrainingConfig(StrictModel):
    """Model and limits of the training service."""

    model_name: str | None = Field(None, description="base_model name for clients; null: the checkpoint as given")
    tokenizer: Annotated[str | None, EXPANDED] = Field(
        None, description="tokenizer folder or hub id for clients; null: the checkpoint"
    )
    layout: str = Field("d1", description="parallel layout of the engine; more than one rank: archon launch")
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    dtype: ComputeDtype = Field("float32", description="dtype of the base and of the computation; LoRAs are float32")
    max_tokens_per_mb: int = Field(16384, gt=0, description="tokens in one packed micro-batch, and of one document")
    max_models: int = Field(64, ge=1, le=2**16, description="maximum trained LoRAs in memory; idle ones move to disk")
    max_loras: int = Field(32, ge=1, le=2**16, description="maximum saved LoRAs in the sampler's memory")
    max_slots: int = Field(32, ge=1, le=2**20, description="answers decoded concurrently")
    disk_gib: float = Field(64.0, gt=0, lt=2**20, description="maximum GiB of a client's checkpoints")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of sampling requests without one")
