"""Configuration of the RL trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from archon.data.config import HELD_OUT, DatasetConfig, TrainingDataConfig
from archon.data.environments import parse_environment
from archon.generation.types import GenerationHyperparameters, GeneratorConfig
from archon.parallel.layout import parse_layout
from archon.remote.config import LaunchConfig, PushConfig, WorkersConfig
from archon.rl.agent_sampling import AgentSampling
from archon.rl.algorithms.aggregation import DrGRPOAggregation
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.logprob_check import check_recomputable
from archon.schema.config import (
    EXPANDED,
    MAX_SAMPLES,
    MAX_SECONDS,
    MAX_STEP_ROWS,
    EngineConfig,
    MetricsConfig,
    StrictModel,
    derive_critic,
    derive_reference,
)
from archon.schema.urls import require_http_url
from archon.training.config import BootstrapFile, CheckpointConfig


class RolloutConfig(StrictModel):
    """Generation of a batch of trajectories."""

    prompts_per_step: int = Field(32, ge=1, le=MAX_STEP_ROWS, description="groups in a training batch")
    max_resamples: int = Field(
        3,
        ge=0,
        description="extra rounds of prompts per step for zero_variance_groups=resample; with max_staleness > 0 also "
        "for failed and rejected episodes",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=MAX_STEP_ROWS,
        description="maximum policy versions between the start of a group and its training; 0: rollout and training "
        "alternate, above 0: they overlap",
    )
    max_concurrent: int | None = Field(
        None, ge=1, description="concurrent episodes with max_staleness > 0; null: as many as the staleness allows"
    )
    reward_timeout: float = Field(15.0, gt=0, le=MAX_SECONDS, description="seconds one reward may run")
    workers: WorkersConfig | None = Field(
        None, description="machine and number of reward and agent workers; null: this machine"
    )
    n_gold_checks: int | None = Field(
        64,
        ge=0,
        description="gold answers scored before step 0, if the rows have some; null: all, 0: none. A built-in reward "
        "must score them 1.0; the scores of other rewards are logged",
    )
    agent_sampling: AgentSampling = Field(
        "override",
        description="sampling parameters in agents' requests: override uses gconfig's, refuse ends the run, allow uses "
        "the agent's, corrects for the temperature and counts uncorrected answers",
    )
    dump_groups: int = Field(1, ge=0, description="groups per step written to trajectories.jsonl")
    servers: list[str] | None = Field(
        None, description="URLs of inference servers that sample the answers; null: the in-process generator"
    )
    launch: LaunchConfig | None = Field(
        None, description="inference servers started and stopped by the run, instead of servers"
    )
    push: PushConfig | None = Field(None, description="weight sync to the servers; null: its defaults")


class EvaluationConfig(StrictModel):
    """Reward on held-out prompts."""

    every: int = Field(20, ge=0, description="steps between evaluations; 0: only before the first and after the last")
    max_prompts: int | None = Field(None, ge=1, description="held-out prompts used; null: all")
    n_samples: int = Field(1, ge=1, le=MAX_SAMPLES, description="sampled answers per prompt")
    temperature: float = Field(1.0, ge=1e-3, description="sampling temperature")
    greedy: bool = Field(True, description="also evaluate greedy answers")
    well_formed: str | None = Field(
        None, description="regular expression of a well-formed answer; the matching fraction is reported"
    )

    @model_validator(mode="after")
    def _check_well_formed(self) -> EvaluationConfig:
        try:
            re.compile(self.well_formed or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"well_formed: {self.well_formed!r} is not a regular expression: {error}") from None
        return self


class LogprobCheckConfig(StrictModel):
    """Check on every batch that generator and trainer compute the same logprobs."""

    max_mismatch: float | None = Field(
        None, gt=0, description="largest mean |logprob difference|; null: the limit for the dtype"
    )


class ControlConfig(StrictModel):
    """Controls for experiments."""

    shuffle_rewards: bool = Field(False, description="permute rewards over the batch: a run that must learn nothing")


class DemonstrationsConfig(StrictModel):
    """Expert answers for policy losses `mix` and `chord`."""

    data: TrainingDataConfig = Field(description="SFT data: conversations, or prompts and responses")
    per_step: int = Field(ge=1, le=MAX_STEP_ROWS, description="rows added to each batch")


class ExperiencesConfig(StrictModel):
    """Experience buffer and checkpoints shared by modes explore, train and bench."""

    path: Annotated[str | None, EXPANDED] = Field(
        None, description="SQLite file of the experience buffer; modes explore and train need it"
    )
    passes: int = Field(1, ge=1, description="mode train: passes over each group")
    wait_seconds: float = Field(
        1800.0, gt=0, le=MAX_SECONDS, description="mode train: how long to wait for the groups of a step"
    )
    weights_from: Annotated[str | None, EXPANDED] = Field(
        None, description="modes explore and bench: load checkpoints from this run folder; null: none"
    )
    sync_every: int = Field(1, ge=1, description="mode explore: steps between checks for a newer checkpoint")
    latest_only: bool = Field(False, description="mode bench: only the latest checkpoint")


class EnvironmentConfig(StrictModel):
    """Objective of the rows of one environment."""

    algorithm: AlgorithmConfig = Field(description="its objective")
    weight: float = Field(1.0, gt=0, description="weight of its loss in the sum over the environments")


class RewardModelConfig(StrictModel):
    """Trained reward model that scores answers."""

    model: str = Field(description="folder of a checkpoint with a value head, such as the export of loss=reward")


class TeacherServerConfig(StrictModel):
    """Teacher behind an OpenAI endpoint that returns prompt logprobs (`echo`)."""

    url: str = Field(description="base URL, ending in /v1")
    model: str = Field("", description="model name on the server")
    max_concurrent: int = Field(16, ge=1, description="concurrent requests")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return require_http_url(url, "teacher.url")


class ResolvedRL(StrictModel):
    """Models and objective with every derived value filled in."""

    actor: EngineConfig = Field(description="the policy")
    ref: EngineConfig | None = Field(description="the reference model; null without a KL term")
    critic: EngineConfig | None = Field(description="the critic; null if the advantage needs none")
    teacher: EngineConfig | TeacherServerConfig | None = Field(description="the teacher; null if none is needed")
    algorithm: AlgorithmConfig = Field(description="the objective")


_GROUP_SIZE = 8


def _set_group_size(gconfig: Any) -> Any:
    """Set `n_samples` to the RL default (a single request has another default), unless it is set."""
    if isinstance(gconfig, GenerationHyperparameters) and "n_samples" not in gconfig.model_fields_set:
        return gconfig.new(n_samples=_GROUP_SIZE)
    return {"n_samples": _GROUP_SIZE, **gconfig} if isinstance(gconfig, Mapping) else gconfig


class RLConfig(StrictModel):
    """Reinforcement learning of one policy."""

    run_dir: Annotated[str, EXPANDED] = Field(description="run directory: metrics, trajectories, checkpoints, export")
    resume: bool = Field(False, description="continue from the run's newest checkpoint, if there is one")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of every random stream of the run")
    mode: Literal["both", "explore", "train", "bench"] = Field(
        "both",
        description="both: sample and train; explore: sample into the experience buffer; train: train on that buffer; "
        "bench: evaluate checkpoints",
    )
    experiences: ExperiencesConfig | None = Field(None, description="settings of modes explore, train and bench")
    total_steps: int = Field(100, ge=1, description="rollout and update steps")
    actor: EngineConfig = Field(description="the policy")
    ref: dict[str, Any] | None = Field(
        None,
        description="reference model of the KL term: fields that differ from the actor, such as path; null: the "
        "initial actor without its LoRA; not loaded if algorithm.kl.coef is 0",
    )
    critic: dict[str, Any] | None = Field(
        None,
        description="critic of advantage gae: fields that differ from the actor, such as optimizer.lr; a policy "
        "checkpoint gets a new value head",
    )
    teacher: dict[str, Any] | None = Field(
        None,
        description="teacher of advantage distill: fields that differ from the actor, such as path; or url and model "
        "of a server that returns prompt logprobs",
    )
    tokenizer: Annotated[str | None, EXPANDED] = Field(None, description="tokenizer folder; null: the actor's")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="the objective")
    environments: dict[str, EnvironmentConfig] | None = Field(
        None,
        description="objective by environment, for rows whose column `environment` names one; without `algorithm`, the "
        "run's: {math: {}, code: {algorithm: {preset: dppo}, weight: 0.5}}",
    )
    gconfig: Annotated[GenerationHyperparameters, BeforeValidator(_set_group_size)] = Field(
        default_factory=lambda: GenerationHyperparameters(n_samples=_GROUP_SIZE),
        description="sampling of training answers",
    )
    generator: GeneratorConfig | None = Field(None, description="the in-process generator; null: its defaults")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="generation of a batch")
    train_data: DatasetConfig = Field(description="prompts to train on")
    curriculum_column: str | None = Field(
        None, description="difficulty column: each epoch starts with the smallest values; null: shuffled"
    )
    eval_data: Annotated[DatasetConfig | None, HELD_OUT] = Field(
        None, description="held-out prompts; split defaults to test if path equals train_data.path"
    )
    demonstrations: DemonstrationsConfig | None = Field(
        None, description="expert answers, for the policy losses that train on them"
    )
    reward: str | RewardModelConfig | None = Field(
        None,
        description="name or dotted path of the reward function, or {model: FOLDER} for a reward model; null: the "
        "workflow or environment scores",
    )
    workflow: str = Field(
        "archon.rl.RLVRWorkflow",
        description="dotted path of the workflow, or an environment: textarena:2048-v0",
    )
    workflow_args: dict[str, Any] = Field(
        default_factory=dict, description="extra constructor arguments, such as max_turns"
    )
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="held-out evaluation")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="extra destinations of metrics")
    logprob_check: LogprobCheckConfig = Field(
        default_factory=LogprobCheckConfig, description="check that trainer and generator agree"
    )
    verify_export: bool = Field(False, description="compare the export's float32 logits with transformers")
    control: ControlConfig = Field(default_factory=ControlConfig, description="controls for experiments")
    bootstrap: BootstrapFile = Field(
        None, description="`archon bootstrap` config that creates the actor's checkpoint if it does not exist"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Refuse the section name of `archon sft`, and several rewards, with the form that RL takes."""
        if isinstance(data, Mapping) and "model" in data:
            raise ValueError("unknown key 'model'; in RL the trained model is `actor`, such as actor.path=FOLDER")
        if isinstance(data, Mapping) and isinstance(data.get("reward"), list):
            raise ValueError(
                "reward is a list; expected one reward: write a function that returns a dictionary of numbers, which "
                "are summed and logged by name"
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _fill_environments(cls, data: Any) -> Any:
        """Set the algorithm of environments that have none to the run's."""
        environments = data.get("environments") if isinstance(data, Mapping) else None
        if not isinstance(environments, Mapping):
            return data
        shared = data.get("algorithm") or {}
        filled = {
            name: {"algorithm": shared, **settings} if isinstance(settings, Mapping) else settings
            for name, settings in environments.items()
        }
        return {**data, "environments": filled}

    @model_validator(mode="before")
    @classmethod
    def _check_reference_is_used(cls, data: Any) -> Any:
        """Refuse a reference model with the default algorithm, which has no KL term."""
        algorithm = (data.get("algorithm") or {}) if isinstance(data, Mapping) else None
        if isinstance(data, Mapping) and data.get("environments"):
            return data  # each environment has an algorithm
        if isinstance(algorithm, Mapping) and data.get("ref") is not None and not {"preset", "kl"} & algorithm.keys():
            raise ValueError(
                "ref is set, and the default algorithm has no KL term to a reference model; set algorithm.kl.coef, "
                "such as 0.04, or algorithm.preset=grpo, or leave ref out"
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _set_environment_reward(cls, data: Any) -> Any:
        """Set the reward of an environment workflow to the environment's name."""
        workflow = data.get("workflow") if isinstance(data, Mapping) else None
        if not isinstance(workflow, str) or parse_environment(workflow) is None:
            return data
        if data.get("reward", workflow) != workflow:
            raise ValueError(
                f"reward is {data['reward']!r}, but workflow {workflow} is an environment that scores its own "
                "episodes; leave reward out"
            )
        return {**data, "reward": workflow}

    @property
    def optimizer_steps(self) -> int | None:
        """Number of optimizer steps over all minibatches and passes; None without training."""
        if self.mode in ("explore", "bench"):
            return None
        return self.total_steps * self.algorithm.ppo_epochs * self.algorithm.minibatches

    def resolve(self) -> ResolvedRL:
        """Return models and objective with the values derived from actor and other sections."""
        algorithm, ref, critic = self.algorithm, None, None
        algorithm = self._with_length(algorithm)
        uses_reference = any(each.kl.coef > 0 for each in self.algorithms)
        if uses_reference or self.ref is not None:  # also checks the fields of an unused reference model
            ref = derive_reference(self.actor, self.ref or {}, "ref")
        if self.critic is not None:
            critic = derive_critic(self.actor, self.critic, "critic")
        needed = ref if uses_reference else None
        return ResolvedRL(
            actor=self.actor, ref=needed, critic=critic, teacher=self._resolve_teacher(), algorithm=algorithm
        )

    @property
    def algorithms(self) -> list[AlgorithmConfig]:
        """The objective of each environment, or the run's alone."""
        return [each.algorithm for each in self.environments.values()] if self.environments else [self.algorithm]

    def resolve_environments(self) -> dict[str, EnvironmentConfig]:
        """Return the environments with the values derived from other sections."""
        return {
            name: each.model_copy(update={"algorithm": self._with_length(each.algorithm)})
            for name, each in (self.environments or {}).items()
        }

    def _with_length(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        aggregation = algorithm.aggregation
        if not isinstance(aggregation, DrGRPOAggregation) or aggregation.max_tokens is not None:
            return algorithm
        length = {"max_tokens": self.gconfig.max_new_tokens}
        return algorithm.model_copy(update={"aggregation": aggregation.model_copy(update=length)})

    def _check_environments(self) -> None:
        if self.environments is None:
            return
        if not self.environments:
            raise ValueError("environments is empty; name at least one, or leave it out")
        for name, each in self.environments.items():
            where, algorithm = f"environments.{name}.algorithm", each.algorithm
            if algorithm.advantage.needs_critic or algorithm.advantage.needs_teacher:
                raise ValueError(
                    f"{where}.advantage is {algorithm.advantage.kind}, whose critic or teacher all rows share; "
                    "choose another, or train the environments in separate runs"
                )
            if algorithm.policy_loss.uses_demonstrations:
                raise ValueError(
                    f"{where}.policy_loss is {algorithm.policy_loss.kind}, whose demonstrations belong to no "
                    "environment; choose another"
                )
            for field in ("ppo_epochs", "minibatches"):
                if getattr(algorithm, field) != getattr(self.algorithm, field):
                    raise ValueError(
                        f"{where}.{field} is {getattr(algorithm, field)}, but algorithm.{field} is "
                        f"{getattr(self.algorithm, field)}; an optimizer step trains all environments: set both to "
                        "one value"
                    )

    def _resolve_teacher(self) -> EngineConfig | TeacherServerConfig | None:
        if self.teacher is None:
            return None
        if "url" in self.teacher:
            return TeacherServerConfig.parse(self.teacher, source="teacher")
        if "path" not in self.teacher:
            raise ValueError("teacher has neither path nor url; set teacher.path to the teacher's checkpoint")
        return derive_reference(self.actor, {"init_from_scratch": False, **self.teacher}, "teacher")

    def _check_mode(self) -> None:
        if (self.mode == "both") != (self.experiences is None):
            missing = "not " if self.experiences is None else ""
            raise ValueError(
                f"mode is {self.mode}, and experiences are {missing}set; set experiences for modes explore, train "
                "and bench only"
            )
        if self.mode in ("explore", "train") and self.experiences and self.experiences.path is None:
            raise ValueError(f"mode is {self.mode}, which needs the buffer's file: set experiences.path")
        if self.mode == "bench" and self.eval_data is None:
            raise ValueError("mode bench evaluates: set eval_data")
        if self.mode != "both" and self.rollout.max_staleness:
            raise ValueError(
                f"rollout.max_staleness is {self.rollout.max_staleness} with mode {self.mode}; only mode both overlaps "
                "rollout and training: set it to 0"
            )
        shares_gpu = self.rollout.launch is not None and self.rollout.launch.gpu_share is not None
        if shares_gpu and (self.mode != "both" or self.rollout.max_staleness):
            raise ValueError(
                f"rollout.launch.gpu_share lets rollout and training alternate on one GPU, but mode is {self.mode} and "
                f"rollout.max_staleness is {self.rollout.max_staleness}; set mode to both and max_staleness to 0, or "
                "gpu_share to null"
            )

    @model_validator(mode="after")
    def _check_sections(self) -> RLConfig:
        algorithm, n_samples = self.algorithm, self.gconfig.n_samples
        if self.actor.lora is not None and self.actor.lora.loras is not None:
            raise ValueError("actor.lora.loras names several LoRAs, but an RL run trains one policy; set lora.rank")
        started = (1 + self.rollout.max_staleness) * self.rollout.prompts_per_step * n_samples
        if started > MAX_STEP_ROWS:
            raise ValueError(
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step}, gconfig.n_samples = {n_samples} and "
                f"rollout.max_staleness = {self.rollout.max_staleness} start {started} answers at once; expected at "
                f"most {MAX_STEP_ROWS}"
            )
        self._check_environments()
        for each in (algorithm, *self.algorithms):
            if each.advantage.is_group_relative and n_samples < 2:
                raise ValueError(
                    f"gconfig.n_samples is {n_samples}; a group needs at least 2 answers to compare rewards"
                )
            if each.zero_variance_groups != "keep" and n_samples < 2:
                raise ValueError(
                    f"algorithm.zero_variance_groups = {each.zero_variance_groups} would leave nothing: a group is "
                    f"one answer (gconfig.n_samples = {n_samples}); set it to keep"
                )
        if algorithm.advantage.needs_critic and self.critic is None:
            raise ValueError(
                f"algorithm.advantage is {algorithm.advantage.kind}, which needs a critic: set `critic`, such as "
                "critic.optimizer.lr=…"
            )
        if self.critic is not None and not algorithm.advantage.needs_critic:
            raise ValueError(
                f"a critic is set, but algorithm.advantage {algorithm.advantage.kind!r} uses none; remove `critic`, or "
                "set algorithm.advantage=gae"
            )
        if algorithm.advantage.needs_teacher and self.teacher is None:
            raise ValueError(
                f"algorithm.advantage is {algorithm.advantage.kind}, which needs a teacher: set teacher.path to its "
                "checkpoint, or teacher.url to a server"
            )
        if self.teacher is not None and not algorithm.advantage.needs_teacher:
            raise ValueError(
                f"a teacher is set, but algorithm.advantage {algorithm.advantage.kind!r} uses none; remove `teacher`, "
                "or set algorithm.advantage=distill"
            )
        if self.teacher is not None and "url" in self.teacher and self.gconfig.temperature != 1:
            raise ValueError(
                f"gconfig.temperature is {self.gconfig.temperature}, but teacher.url returns logprobs at temperature 1 "
                "only; set gconfig.temperature=1, or load the teacher with teacher.path"
            )
        if self.teacher is not None and "url" in self.teacher and self.rollout.agent_sampling == "allow":
            raise ValueError(
                "rollout.agent_sampling=allow lets agents choose temperatures, but teacher.url returns logprobs at "
                "temperature 1 only; set rollout.agent_sampling=override, or load the teacher with teacher.path"
            )
        self._check_mode()
        if algorithm.policy_loss.uses_demonstrations != (self.demonstrations is not None):
            missing = "not " if self.demonstrations is None else ""
            raise ValueError(
                f"algorithm.policy_loss is {algorithm.policy_loss.kind}, and demonstrations are {missing}set; only "
                "policy losses mix and chord train on demonstrations"
            )
        if self.demonstrations is not None and (self.critic is not None or self.teacher is not None):
            raise ValueError("demonstrations have neither values nor a teacher; remove `critic` and `teacher`")
        if self.gconfig.seed is not None:
            raise ValueError("gconfig.seed would make all answers of a run equal; set `seed` instead")
        if self.verify_export and self.actor.dtype == "bfloat16":
            raise ValueError(
                "verify_export compares float32 logits, but bfloat16 rounding of actor.dtype exceeds its tolerance; "
                "set verify_export=false, or actor.dtype=float32"
            )
        check_recomputable(self.gconfig, self.gconfig.temperature)
        self._check_servers()
        self.resolve()
        return self

    def _check_servers(self) -> None:
        rollout = self.rollout
        if rollout.servers is not None and rollout.launch is not None:
            raise ValueError("rollout.servers and rollout.launch are both set; set only one")
        for url in rollout.servers or []:
            require_http_url(url, "rollout.servers")
        if rollout.servers is None and rollout.launch is None:
            if rollout.push is not None:
                raise ValueError("rollout.push is set without rollout.servers; it configures weight sync to servers")
            return
        section = "rollout.servers" if rollout.launch is None else "rollout.launch"
        in_process = {} if self.generator is None else self.generator.model_dump(exclude_defaults=True)
        in_process.pop("record_experts", None)
        if in_process:
            raise ValueError(
                f"generator.{min(in_process)} is set, but with {section} servers sample; they use only "
                "generator.record_experts: remove it"
            )
        if self.mode != "both":
            raise ValueError(f"mode is {self.mode}, and {section} is set; only mode both pushes weights to servers")
        if self.verify_export and parse_layout(self.actor.layout).world_size > 1:
            raise ValueError(
                f"verify_export needs a full copy of the model, but no process has one with {section} and "
                f"actor.layout {self.actor.layout}; set verify_export=false"
            )
        shared = None if rollout.push is None else rollout.push.folder
        if rollout.launch is not None and rollout.launch.launcher != "local" and shared is None:
            raise ValueError(
                f"rollout.launch.launcher {rollout.launch.launcher} starts servers on other machines; set "
                "rollout.push.folder to a folder that all machines share"
            )
