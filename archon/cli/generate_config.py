"""Configuration of `archon generate`, in a separate module because the generator's types import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from archon.generation.types import GenerationHyperparameters
from archon.schema.config import EXPANDED, ComputeDtype


class GenerateConfig(GenerationHyperparameters):
    """Prompts, sampling and model of `archon generate`."""

    prompts: list[str] = Field(default_factory=list, description="prompts to answer; also --prompt, repeatable")
    prompts_file: Annotated[Path | None, EXPANDED] = Field(None, description="one prompt per line; also --prompts-file")
    chat: bool | Literal["auto"] = Field("auto", description="use the chat template; auto: if the tokenizer has one")
    tokenizer: Annotated[str | None, EXPANDED] = Field(None, description="tokenizer folder; null: the checkpoint's")
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    dtype: ComputeDtype = Field("float32", description="dtype of the weights and the KV cache")
    max_slots: int = Field(32, ge=1, le=2**20, description="answers decoded concurrently")
