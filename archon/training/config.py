"""Configuration of bootstrap, SFT and preference training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from archon.data.config import DatasetConfig
from archon.schema.config import (
    RELATIVE_TO_CONFIG,
    EngineConfig,
    MetricsConfig,
    OptimizerConfig,
    SchedulerConfig,
    StrictModel,
    derive_critic,
    derive_reference,
)


def _require_file_name(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError(
            f"its keys ({', '.join(map(str, value))}) belong in a separate file: bootstrap: FILE.yaml; "
            "`archon bootstrap --help` lists them"
        )
    return value


BootstrapFile = Annotated[str | None, BeforeValidator(_require_file_name), RELATIVE_TO_CONFIG]


class CheckpointConfig(StrictModel):
    """When checkpoints are saved."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end or when stopped")
    keep: int = Field(2, ge=1, description="checkpoints kept")


class ResolvedSFT(StrictModel):
    """The complete configuration of each model of a run."""

    model: EngineConfig = Field(description="the model")
    ref: EngineConfig | None = Field(None, description="the reference; null where the loss has none")


class LoRAData(StrictModel):
    """The rows of one of several adapters."""

    train_data: DatasetConfig = Field(description="rows to train it on")
    batch_size: int | None = Field(None, ge=1, description="its rows an optimizer step; null: those of the run")
    eval_data: DatasetConfig | None = Field(None, description="its held-out rows")


class SFTConfig(StrictModel):
    """Supervised fine-tuning of one model."""

    run_dir: str = Field(description="folder of the run: metrics, checkpoints, export")
    resume: bool = Field(False, description="continue from the run's newest checkpoint, if there is one")
    seed: int = Field(0, ge=0, lt=2**63, description="order of the data")
    total_steps: int | None = Field(None, ge=1, description="optimizer steps; null: as `epochs` says")
    epochs: int = Field(1, ge=1, description="passes over the data, where total_steps is null")
    batch_size: int = Field(32, ge=1, description="rows an optimizer step")
    model: EngineConfig = Field(description="the model")
    tokenizer: str | None = Field(None, description="tokenizer folder; null: the model's")
    train_data: DatasetConfig = Field(description="rows to train on")
    eval_data: DatasetConfig | None = Field(None, description="held-out rows")
    lora_data: dict[str, LoRAData] | None = Field(
        None, description="rows of those of model.lora.loras, by name, that have others than train_data"
    )
    eval_every: int = Field(50, ge=0, description="steps between evaluations; 0: only after the last")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="where metrics are sent as well")
    bootstrap: BootstrapFile = Field(None, description="file of `archon bootstrap`, to create a missing checkpoint")

    @property
    def optimizer_steps(self) -> int | None:
        """How many steps the optimizer takes; None: as many as there are data."""
        return self.total_steps

    def resolve(self) -> ResolvedSFT:
        """Returns the models as the run uses them."""
        return ResolvedSFT(model=self.model)


class PreferenceConfig(SFTConfig):
    """Training of one model on pairs of answers."""

    loss: Literal["dpo", "ipo", "reward"] = Field("dpo", description="dpo, ipo: of a policy; reward: of a reward model")
    beta: float = Field(0.1, gt=0, description="how strongly dpo and ipo hold the policy to the reference")
    ref: dict[str, Any] | None = Field(
        None,
        description="the reference of dpo and ipo: the fields in which it differs from the model, such as path; null: "
        "the model as it begins",
    )

    def resolve(self) -> ResolvedSFT:
        """Returns the models as the run uses them: one with a value head for loss `reward`, else also a reference."""
        if self.loss == "reward":
            given = {} if self.model.init_score is None else {"init_score": self.model.init_score}
            return ResolvedSFT(model=derive_critic(self.model, given, "model"))
        return ResolvedSFT(model=self.model, ref=derive_reference(self.model, self.ref or {}, "ref"))

    @model_validator(mode="after")
    def _check_models(self) -> PreferenceConfig:
        if self.loss == "reward" and self.ref is not None:
            raise ValueError("loss reward needs no reference model; remove `ref`")
        if self.loss == "reward" and self.model.lora is not None:
            raise ValueError(
                "loss reward trains a value head, which an adapter's files cannot hold; set model.lora to null"
            )
        if self.loss != "reward" and self.model.is_critic:
            raise ValueError(f"model.is_critic is set, and loss {self.loss} trains a policy; choose loss=reward")
        if self.model.lora is not None and self.model.lora.loras is not None:
            raise ValueError("model.lora.loras has several adapters, which only archon sft trains; give one")
        self.resolve()
        return self


class TokenizerRecipe(StrictModel):
    """The tokenizer of a bootstrapped checkpoint."""

    kind: Literal["characters", "bpe"] = Field("characters", description="one token a character, or byte-level BPE")
    alphabet: str = Field("0123456789+-*/=() ", description="the characters of kind `characters`")
    vocab_size: int = Field(2048, ge=260, description="tokens of kind `bpe`, the special ones included")
    train_data: DatasetConfig | None = Field(None, description="what kind `bpe` is trained on")
    images: bool = Field(False, description="tokens and a chat template for pictures, as Qwen has them")
    chat_template: Literal["plain", "chatml"] = Field(
        "chatml", description="plain: question then answer, nothing between; chatml: Qwen's form with roles and tools"
    )


class WarmupTarget(StrictModel):
    """Ends a warm-up early, at a held-out reward from which RL can continue."""

    reward: str = Field(description="name or dotted path of the reward function")
    target_reward: float = Field(
        description="held-out reward of one sampled answer a prompt, at which the warm-up ends"
    )
    eval_data: DatasetConfig = Field(description="held-out prompts")
    every: int = Field(25, ge=1, description="steps between measurements")
    max_new_tokens: int = Field(16, ge=1, description="length limit of an answer, in tokens")


class WarmupConfig(StrictModel):
    """Supervised warm-up of a bootstrapped checkpoint."""

    total_steps: int = Field(200, ge=1, description="optimizer steps, at most")
    target: WarmupTarget | None = Field(None, description="reward that ends it early")
    batch_size: int = Field(64, ge=1, description="rows an optimizer step")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW of the warm-up")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="schedule of the warm-up")
    train_data: DatasetConfig = Field(description="rows to warm up on")


class BootstrapConfig(StrictModel):
    """A small Hugging Face checkpoint, created if it does not exist."""

    path: str | None = Field(None, description="folder of the checkpoint; a run that names this file: its model's path")
    engine: dict[str, Any] | None = Field(
        None,
        description="fields of the engine that creates it, such as layout and device; by default those of the run that "
        "names this file",
    )
    model_type: str = Field("qwen3", description="family of the made model")
    hf_config: dict[str, Any] = Field(default_factory=dict, description="fields of its config.json")
    tokenizer: TokenizerRecipe = Field(default_factory=TokenizerRecipe, description="its tokenizer")
    seed: int = Field(0, ge=0, lt=2**63, description="of its initial weights")
    warmup: WarmupConfig | None = Field(None, description="supervised warm-up before it is used")
