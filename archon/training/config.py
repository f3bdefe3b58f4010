"""Configuration of bootstrap, SFT and preference training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from archon.data.config import HELD_OUT, DatasetConfig, DatasetKind, TrainingDataConfig
from archon.schema.config import (
    EXPANDED,
    MAX_STEP_ROWS,
    RELATIVE_TO_CONFIG,
    EngineConfig,
    MetricsConfig,
    OptimizerConfig,
    SchedulerConfig,
    StrictModel,
    derive_critic,
    derive_reference,
)
from archon.training.preference_kinds import (
    DEFAULT_BETA,
    DEFAULT_GAMMA,
    DEFAULT_NLL_COEF,
    REFERENCE_FREE,
    PreferenceLoss,
)


def _require_file_name(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError(
            f"its keys ({', '.join(map(str, value))}) belong in a separate file: bootstrap: FILE.yaml; "
            "`archon bootstrap --help` lists them"
        )
    if value == "" or (isinstance(value, str) and "\0" in value):
        raise ValueError(f"got {value!r}, expected the name of a file, or null")
    return value


BootstrapFile = Annotated[str | None, BeforeValidator(_require_file_name), RELATIVE_TO_CONFIG]


class CheckpointConfig(StrictModel):
    """Checkpoint interval and retention."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end or when stopped")
    keep: int = Field(2, ge=1, description="number of checkpoints to keep")


class ResolvedSFT(StrictModel):
    """Complete configuration of each model of a run."""

    model: EngineConfig = Field(description="the model")
    ref: EngineConfig | None = Field(None, description="reference model; null if the loss has none")


class LoRAData(StrictModel):
    """Data of one LoRA in a multi-LoRA run."""

    train_data: TrainingDataConfig = Field(description="training rows")
    batch_size: int | None = Field(
        None, ge=1, le=MAX_STEP_ROWS, description="rows per optimizer step; null: batch_size of the run"
    )
    eval_data: Annotated[TrainingDataConfig | None, HELD_OUT] = Field(
        None, description="held-out rows; split defaults to test if path equals train_data.path"
    )


class SFTConfig(StrictModel):
    """Supervised fine-tuning of one model."""

    run_dir: Annotated[str, EXPANDED] = Field(description="folder of the run: metrics, checkpoints, export")
    resume: bool = Field(False, description="continue from the run's newest checkpoint, if there is one")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the data order")
    total_steps: int | None = Field(None, ge=1, description="optimizer steps; null: set by `epochs`")
    epochs: int = Field(
        1, ge=1, description="passes over the data if total_steps is null; the last batch of a pass may be smaller"
    )
    batch_size: int = Field(32, ge=1, le=MAX_STEP_ROWS, description="rows per optimizer step")
    model: EngineConfig = Field(description="the model")
    tokenizer: Annotated[str | None, EXPANDED] = Field(None, description="tokenizer folder; null: the model's")
    train_data: TrainingDataConfig = Field(description="training rows")
    eval_data: Annotated[TrainingDataConfig | None, HELD_OUT] = Field(
        None, description="held-out rows; split defaults to test if path equals train_data.path"
    )
    lora_data: dict[str, LoRAData] | None = Field(
        None, description="data by LoRA name, for LoRAs that do not train on train_data"
    )
    eval_every: int = Field(50, ge=0, description="steps between evaluations; 0: only after the last")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="additional metric sinks")
    bootstrap: BootstrapFile = Field(None, description="file of `archon bootstrap`, to create a missing checkpoint")

    @property
    def data_kind(self) -> DatasetKind:
        """Kind of the rows of `train_data` and `eval_data`."""
        return "sft"

    @property
    def optimizer_steps(self) -> int | None:
        """Number of optimizer steps; None: set by the data."""
        return self.total_steps

    def resolve(self) -> ResolvedSFT:
        """Return the resolved models of the run."""
        return ResolvedSFT(model=self.model)


class PreferenceConfig(SFTConfig):
    """Preference training on pairs of answers."""

    loss: PreferenceLoss = Field(
        "dpo", description="reward trains a reward model, the others a policy; kto needs labels, not pairs"
    )
    beta: float | None = Field(
        None,
        gt=0,
        description="β: strength of the KL constraint (dpo, ipo, kto), scale of the margin (cpo, simpo), or weight of "
        "the odds ratio (orpo); null: 0.1, and 2 for simpo",
    )
    gamma: float | None = Field(
        None, ge=0, description=f"target margin of simpo, in units of β times log-probability; null: {DEFAULT_GAMMA}"
    )
    nll_coef: float | None = Field(
        None,
        ge=0,
        description="weight of the negative log-likelihood of chosen answers, averaged over tokens; null: 1 for cpo "
        "and orpo, else 0",
    )
    desirable_weight: float | None = Field(None, gt=0, description="weight of kto's desirable answers; null: 1")
    undesirable_weight: float | None = Field(None, gt=0, description="weight of kto's undesirable answers; null: 1")
    ref: dict[str, Any] | None = Field(
        None,
        description="reference model of dpo, ipo and kto: fields that differ from the model, such as path; null: the "
        "initial model",
    )

    @property
    def data_kind(self) -> DatasetKind:
        """Kind of the rows of `train_data` and `eval_data`."""
        kinds: dict[str, DatasetKind] = {"reward": "rw", "kto": "kto"}
        return kinds.get(self.loss, "dpo")

    @property
    def resolved_beta(self) -> float:
        """β of the loss."""
        return DEFAULT_BETA.get(self.loss, 1.0) if self.beta is None else self.beta

    @property
    def resolved_gamma(self) -> float:
        """γ of the loss."""
        return DEFAULT_GAMMA if self.gamma is None else self.gamma

    @property
    def resolved_nll_coef(self) -> float:
        """Weight of the NLL of chosen answers."""
        return DEFAULT_NLL_COEF.get(self.loss, 0.0) if self.nll_coef is None else self.nll_coef

    def resolve(self) -> ResolvedSFT:
        """Return the resolved models: a value head for loss `reward`, otherwise a policy and a reference."""
        if self.loss == "reward":
            changes = {} if self.model.init_score is None else {"init_score": self.model.init_score}
            return ResolvedSFT(model=derive_critic(self.model, changes, "model"))
        if self.loss in REFERENCE_FREE:
            return ResolvedSFT(model=self.model)
        return ResolvedSFT(model=self.model, ref=derive_reference(self.model, self.ref or {}, "ref"))

    @model_validator(mode="after")
    def _check_models(self) -> PreferenceConfig:
        if self.loss in REFERENCE_FREE and self.ref is not None:
            raise ValueError(f"loss {self.loss} needs no reference model; remove `ref`")
        if self.gamma is not None and self.loss != "simpo":
            raise ValueError(f"gamma is {self.gamma}, which only loss simpo uses, but loss is {self.loss}; remove it")
        if self.nll_coef is not None and self.loss == "reward":
            raise ValueError(f"nll_coef is {self.nll_coef}, but a reward model has no likelihood; remove it")
        if self.nll_coef is not None and self.loss == "kto":
            raise ValueError(f"nll_coef is {self.nll_coef}, but rows of loss kto have no chosen answers; remove it")
        for name in ("desirable_weight", "undesirable_weight"):
            if self.loss != "kto" and getattr(self, name) is not None:
                raise ValueError(f"{name} is set, which only loss kto uses, but loss is {self.loss}; remove it")
        if self.loss == "kto" and self.batch_size < 2:
            raise ValueError(
                "batch_size is 1, but loss kto pairs a prompt with the answer of another row; set it to 2 or more"
            )
        if self.loss == "reward" and self.model.lora is not None:
            raise ValueError(
                "loss reward trains a value head, and no command loads a LoRA with one; set model.lora to null"
            )
        if self.loss != "reward" and self.model.is_critic:
            raise ValueError(f"model.is_critic is set, and loss {self.loss} trains a policy; choose loss=reward")
        if self.model.lora is not None and self.model.lora.loras is not None:
            raise ValueError("model.lora.loras has several LoRAs, which only archon sft trains; set one")
        self.resolve()
        return self


class TokenizerRecipe(StrictModel):
    """The tokenizer of a bootstrapped checkpoint."""

    kind: Literal["characters", "bpe"] = Field("characters", description="one token per character, or byte-level BPE")
    alphabet: str = Field("0123456789+-*/=() ", description="characters of kind `characters`")
    vocab_size: int = Field(
        2048, ge=260, le=2**20, description="vocabulary size of kind `bpe`, special tokens included"
    )
    train_data: DatasetConfig | None = Field(None, description="training text of kind `bpe`")
    images: bool = Field(False, description="add the image tokens and the chat template of Qwen")
    chat_template: Literal["plain", "chatml"] = Field(
        "chatml",
        description="plain: question and answer without separators; chatml: Qwen's format with roles and tools",
    )


class WarmupTarget(StrictModel):
    """Early end of a warm-up at a held-out reward."""

    reward: str = Field(description="name or dotted path of the reward function")
    target_reward: float = Field(
        description="mean held-out reward (one sampled answer per prompt) that ends the warm-up"
    )
    eval_data: DatasetConfig = Field(description="held-out prompts")
    every: int = Field(25, ge=1, description="steps between measurements")
    max_new_tokens: int = Field(16, ge=1, description="maximum answer length in tokens")


class WarmupConfig(StrictModel):
    """Supervised warm-up of a bootstrapped checkpoint."""

    total_steps: int = Field(200, ge=1, description="maximum optimizer steps")
    target: WarmupTarget | None = Field(None, description="held-out reward that ends the warm-up early")
    batch_size: int = Field(64, ge=1, le=MAX_STEP_ROWS, description="rows per optimizer step")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW of the warm-up")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="schedule of the warm-up")
    train_data: TrainingDataConfig = Field(description="rows to warm up on")


class BootstrapConfig(StrictModel):
    """Small Hugging Face checkpoint, created if it does not exist."""

    path: Annotated[str | None, EXPANDED] = Field(
        None, description="checkpoint folder; null: the model path of the run that names this file"
    )
    engine: dict[str, Any] | None = Field(
        None,
        description="engine fields for the creation, such as layout and device; null: the fields of the run",
    )
    model_type: str = Field("qwen3", description="model family")
    hf_config: dict[str, Any] = Field(default_factory=dict, description="fields of config.json")
    tokenizer: TokenizerRecipe = Field(default_factory=TokenizerRecipe, description="tokenizer")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the initial weights")
    warmup: WarmupConfig | None = Field(None, description="supervised warm-up")
