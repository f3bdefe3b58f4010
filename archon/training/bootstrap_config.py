"""Configuration of a small checkpoint that a recipe makes for itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from archon.data.config import DatasetConfig
from archon.schema.config import (
    OptimizerConfig,
    SchedulerConfig,
    StrictModel,
)


class TokenizerRecipe(StrictModel):
    """A tokenizer made by the recipe."""

    kind: Literal["characters", "bpe"] = Field("characters", description="one token a character, or byte-level BPE")
    alphabet: str = Field("0123456789+-*/=() ", description="the characters of kind `characters`")
    vocab_size: int = Field(2048, ge=260, description="tokens of kind `bpe`, the special ones included")
    train_data: DatasetConfig | None = Field(None, description="what kind `bpe` is trained on")
    chat_template: Literal["plain", "chatml"] = Field(
        "chatml", description="plain: question then answer, nothing between; chatml: Qwen's form with roles and tools"
    )


class WarmupTarget(StrictModel):
    """Ends a warm-up early: where reinforcement is to take over, however many steps that took."""

    reward: str = Field(description="name or dotted path of the reward function")
    at_least: float = Field(description="held-out reward of one sampled answer a prompt, at which the warm-up ends")
    eval_data: DatasetConfig = Field(description="held-out prompts")
    every: int = Field(25, ge=1, description="steps between measurements")
    max_new_tokens: int = Field(16, ge=1, description="length limit of an answer, in tokens")


class WarmupConfig(StrictModel):
    """Supervised warm-up of a made checkpoint."""

    total_steps: int = Field(200, ge=1, description="optimizer steps, at most")
    target: WarmupTarget | None = Field(None, description="reward that ends it early")
    batch_size: int = Field(64, ge=1, description="rows an optimizer step")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW of the warm-up")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="schedule of the warm-up")
    train_data: DatasetConfig = Field(description="rows to warm up on")


class BootstrapConfig(StrictModel):
    """A small checkpoint in Hugging Face form, made where it does not exist yet."""

    path: str | None = Field(None, description="folder of the checkpoint; a run that names this file: its model's path")
    engine: dict[str, Any] | None = Field(
        None,
        description="fields of the engine that makes it, such as layout and device; the others are those of the run "
        "that names this file, or the defaults",
    )
    model_type: str = Field("qwen3", description="family of the made model")
    hf_config: dict[str, Any] = Field(default_factory=dict, description="fields of its config.json")
    tokenizer: TokenizerRecipe = Field(default_factory=TokenizerRecipe, description="its tokenizer")
    seed: int = Field(0, ge=0, lt=2**63, description="of its initial weights")
    warmup: WarmupConfig | None = Field(None, description="supervised warm-up before it is used")
