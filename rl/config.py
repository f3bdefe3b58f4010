"""Configuration of the RL and SFT trainers. Every field carries its default, its description and its unit."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from archon.parallel.layout import parse_layout
from archon.rl.algorithms.advantages import GROUP_ADVANTAGES
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.replay import check_replayable
from archon.rl.types import GenerationHyperparameters
from archon.schema.config import EngineConfig, MetricsConfig, OptimizerConfig, SchedulerConfig, StrictModel


class DatasetConfig(StrictModel):
    """One dataset: a named one, a JSONL or parquet file, or a Hugging Face set."""

    path: str = Field(
        description="a named set (gsm8k, arithmetic, …) | a .jsonl or .parquet file or folder | a Hugging Face set | "
        "python:package.module.function, which gives the rows of a split"
    )
    split: str = Field("train", description="which part of it")
    subset: str | None = Field(None, description="configuration of a Hugging Face set that has several")
    data_dir: str | None = Field(
        None, description="folder of a named set's files; null: of that name in $ARCHON_DATA or ../shared/data"
    )
    prompt_key: str = Field("prompt", description="column of the prompt; a named set knows its own")
    response_key: str | None = Field("response", description="column of the answer; null: conversations in prompt_key")
    system_prompt: str | None = Field(None, description="system message put before every prompt")
    instruction: str | None = Field(
        None, description="text put behind the last user message; null: the named set's own"
    )
    max_length: int | None = Field(None, ge=1, description="tokens; longer rows are left out, and counted")
    limit: int | None = Field(None, ge=1, description="use only so many rows, from the start")
    seed: int = Field(0, ge=0, lt=2**63, description="of the split of a generated set")
    raw: bool = Field(False, description="RL rows also hold the source's own row, which a Trinity-style workflow reads")


class GeneratorConfig(StrictModel):
    """The in-process generator."""

    max_slots: int = Field(256, ge=1, description="answers decoded together")
    page_size: int = Field(32, ge=1, description="tokens in a page of the key-value cache")
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="GiB for the key-value cache; null: what max_slots needs, at most a quarter of what is free",
    )
    max_seq_len: int | None = Field(None, ge=2, description="tokens of prompt and answer; null: the model's limit")
    prefill_tokens: int = Field(8192, ge=1, description="prompt tokens read in one step")


class RolloutConfig(StrictModel):
    """How a batch of trajectories is gathered."""

    prompts_per_step: int = Field(32, ge=1, description="groups in a training batch")
    max_refills: int = Field(
        3,
        ge=0,
        description="further rounds of prompts a step, for groups_without_spread=refill; with max_staleness above 0 "
        "for failed and rejected episodes too",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="versions by which the policy may be ahead of the one a group was begun with; 0: rollout and "
        "training take turns, more: they overlap",
    )
    max_concurrent: int | None = Field(
        None, ge=1, description="episodes at once, where max_staleness is above 0; null: as many as it admits"
    )
    reward_timeout: float = Field(15.0, gt=0, description="seconds one reward may run")
    reward_workers: int | None = Field(None, ge=1, description="reward processes; null: one a core, at most 8")
    gold_checked: int | None = Field(64, ge=0, description="gold answers scored before step 0; null: all, 0: none")
    dump_groups: int = Field(1, ge=0, description="groups a step written to trajectories.jsonl")


class EvaluationConfig(StrictModel):
    """Reward on held-out prompts."""

    every: int = Field(20, ge=0, description="steps between evaluations; 0: only before the first and after the last")
    max_prompts: int | None = Field(None, ge=1, description="held-out prompts used; null: all")
    n_samples: int = Field(1, ge=1, description="sampled answers a prompt")
    temperature: float = Field(1.0, ge=1e-3, description="of the sampled answers")
    greedy: bool = Field(True, description="also the reward of the most likely answer")
    well_formed: str | None = Field(
        None, description="regular expression of a well-formed answer; its share is reported"
    )

    @model_validator(mode="after")
    def _expression_is_one(self) -> EvaluationConfig:
        try:
            re.compile(self.well_formed or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"well_formed: {self.well_formed!r} is not a regular expression: {error}") from None
        return self


class CheckpointConfig(StrictModel):
    """When the whole state of training is saved."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end or when stopped")
    keep: int = Field(2, ge=1, description="checkpoints kept")


class GateConfig(StrictModel):
    """The check on every batch that generator and trainer compute the same policy."""

    limit: float | None = Field(
        None, gt=0, description="largest mean |logprob difference|; null: the dtype's own limit"
    )


class ControlConfig(StrictModel):
    """Controls for experiments."""

    shuffle_rewards: bool = Field(False, description="permute rewards over the batch: a run that must learn nothing")


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
    """Ends a warm-up early: where reinforcement is to take over, whatever the machine's rounding made of the way
    there."""

    reward: str = Field(description="name or dotted path of the reward function")
    at_least: float = Field(description="held-out reward of one sampled answer a prompt, at which the warm-up ends")
    eval_data: DatasetConfig = Field(description="held-out prompts")
    every: int = Field(25, ge=1, description="steps between measurements")
    max_new_tokens: int = Field(16, ge=1, description="length limit of an answer, in tokens")


class WarmupConfig(StrictModel):
    """Supervised warm-up of a made checkpoint."""

    total_steps: int = Field(200, ge=1, description="optimiser steps, at most")
    target: WarmupTarget | None = Field(None, description="reward that ends it early")
    batch_size: int = Field(64, ge=1, description="rows an optimiser step")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW of the warm-up")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="schedule of the warm-up")
    train_data: DatasetConfig = Field(description="rows to warm up on")


class BootstrapConfig(StrictModel):
    """Makes a small checkpoint in Hugging Face form where `path` of the model does not exist yet."""

    model_type: str = Field("qwen3", description="family of the made model")
    hf_config: dict[str, Any] = Field(default_factory=dict, description="fields of its config.json")
    tokenizer: TokenizerRecipe = Field(default_factory=TokenizerRecipe, description="its tokenizer")
    seed: int = Field(0, ge=0, lt=2**63, description="of its initial weights")
    warmup: WarmupConfig | None = Field(None, description="supervised warm-up before it is used")


class RLConfig(StrictModel):
    """Reinforcement learning of one policy."""

    run_dir: str = Field(description="folder of the run: metrics, trajectories, checkpoints, export")
    resume: bool = Field(False, description="go on from the run's newest checkpoint, if there is one")
    seed: int = Field(0, ge=0, lt=2**63, description="every random stream of the run derives from it")
    total_steps: int = Field(100, ge=1, description="rollout-and-update rounds")
    actor: EngineConfig = Field(description="the policy")
    ref: EngineConfig | None = Field(
        None, description="the reference model of the KL term; not loaded where algorithm.kl_coef is 0"
    )
    critic: EngineConfig | None = Field(
        None, description="the critic of advantage gae; a policy's checkpoint gets a new value head"
    )
    tokenizer: str | None = Field(None, description="tokenizer folder; null: the actor's")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="the objective")
    gconfig: GenerationHyperparameters = Field(
        default_factory=lambda: GenerationHyperparameters(n_samples=8), description="sampling of training answers"
    )
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig, description="the in-process generator")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="gathering of a batch")
    train_data: DatasetConfig = Field(description="prompts to train on")
    eval_data: DatasetConfig | None = Field(None, description="held-out prompts")
    reward: str = Field(description="name or dotted path of the reward function")
    workflow: str = Field("archon.rl.RLVRWorkflow", description="dotted path of the workflow")
    workflow_args: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of its constructor, such as max_turns"
    )
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="held-out evaluation")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="where metrics are sent as well")
    gate: GateConfig = Field(default_factory=GateConfig, description="ratio gate")
    verify_export: bool = Field(False, description="compare the export's float32 logits in transformers")
    control: ControlConfig = Field(default_factory=ControlConfig, description="controls for experiments")
    bootstrap: BootstrapConfig | None = Field(None, description="make the actor's checkpoint first, if it is not there")

    @model_validator(mode="after")
    def _parts_agree(self) -> RLConfig:
        if self.algorithm.kl_coef > 0 and self.ref is None:
            raise ValueError(
                f"algorithm.kl_coef is {self.algorithm.kl_coef}, which needs a reference model: set `ref`, or "
                "algorithm.kl_coef=0"
            )
        if self.algorithm.advantage in GROUP_ADVANTAGES and self.gconfig.n_samples < 2:
            raise ValueError(
                f"gconfig.n_samples is {self.gconfig.n_samples}; a group needs at least 2 answers to differ in reward"
            )
        if self.algorithm.groups_without_spread != "keep" and self.gconfig.n_samples < 2:
            raise ValueError(
                f"algorithm.groups_without_spread = {self.algorithm.groups_without_spread} would leave nothing, as a "
                f"group is one answer (gconfig.n_samples = {self.gconfig.n_samples}); set it to keep"
            )
        if self.algorithm.length_budget is None:
            self.algorithm.length_budget = self.gconfig.max_new_tokens
        self._critic_agrees()
        if self.gconfig.seed is not None:
            raise ValueError("gconfig.seed is not for a run, whose answers would all be alike; set `seed`")
        if self.ref is not None:
            _follow(self.ref, self.actor)
        if self.verify_export and self.actor.dtype == "bfloat16":
            raise ValueError(
                "verify_export compares float32 logits, and actor.dtype is bfloat16, whose rounding is larger than any "
                "difference allowed; set verify_export=false, or actor.dtype=float32"
            )
        if self.rollout.max_staleness and parse_layout(self.actor.layout).world_size > 1:
            raise ValueError(
                f"rollout.max_staleness is {self.rollout.max_staleness}, and actor.layout {self.actor.layout} has "
                "several processes; rollouts run ahead on one process only, set rollout.max_staleness=0"
            )
        check_replayable(self.gconfig, self.gconfig.temperature)
        _require_exportable(self.actor, "actor")
        return self

    def _critic_agrees(self) -> None:
        needed = self.algorithm.advantage == "gae"
        if needed and self.critic is None:
            raise ValueError("algorithm.advantage is gae, which needs a critic: set `critic`, such as critic.path=…")
        if self.critic is None:
            return
        if not needed:
            raise ValueError(
                f"a critic is set, and algorithm.advantage {self.algorithm.advantage!r} has no use for it; remove "
                "`critic`, or set algorithm.advantage=gae"
            )
        self.critic.is_critic = True
        if "init_score" not in self.critic.model_fields_set:
            self.critic.init_score = True
        _follow(self.critic, self.actor)


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
        _require_exportable(self.model, "model")
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
            _follow(self.ref, self.model)
        return self


def _follow(other: EngineConfig, model: EngineConfig) -> None:
    """Where a second model is and what it can hold is as for the first, unless it says otherwise: both are on the same
    processes and see the same batches."""
    for name in ("layout", "device", "dtype", "max_tokens_per_mb", "timeout_s", "stall_s"):
        if name not in other.model_fields_set:
            setattr(other, name, getattr(model, name))


def _require_exportable(model: EngineConfig, name: str) -> None:
    """ValueError for a model whose export, at the end of the run, would be refused."""
    if model.router_bias_update_rate:
        raise ValueError(
            f"{name}.router_bias_update_rate = {model.router_bias_update_rate:g} moves balancing biases, which the "
            f"Hugging Face export at the end of the run cannot hold; set it to 0, and {name}.router_aux_loss_coef to "
            "balance experts by a loss"
        )
