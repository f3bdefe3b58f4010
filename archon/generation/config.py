"""Configuration of the in-process inference engine."""

from __future__ import annotations

from pydantic import Field

from archon.schema.config import (
    StrictModel,
)


class GeneratorConfig(StrictModel):
    """The in-process inference engine."""

    max_slots: int = Field(256, ge=1, le=2**20, description="answers decoded together")
    page_size: int = Field(32, ge=1, le=2**20, description="tokens in a page of the key-value cache")
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="GiB for the key-value cache; null: what max_slots needs, at most a quarter of the free memory",
    )
    max_seq_len: int | None = Field(None, ge=2, description="tokens of prompt and answer; null: the model's limit")
    prefill_tokens: int = Field(8192, ge=1, description="prompt tokens read in one step")
