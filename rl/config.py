"""Configuration of the RL trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from archon.data.config import DatasetConfig
from archon.data.environments import parse_environment
from archon.generation.types import GenerationHyperparameters, GeneratorConfig
from archon.parallel.layout import parse_layout
from archon.remote.config import LaunchConfig, PushConfig, WorkersConfig
from archon.rl.agent_sampling import AgentSampling
from archon.rl.algorithms.aggregation import DrGRPOAggregation
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.logprob_check import check_recomputable
from archon.schema.config import (
    MAX_SECONDS,
    EngineConfig,
    MetricsConfig,
    StrictModel,
    derive_critic,
    derive_reference,
)
from archon.training.config import BootstrapFile, CheckpointConfig


class RolloutConfig(StrictModel):
    """How a batch of trajectories is generated."""

    prompts_per_step: int = Field(32, ge=1, description="groups in a training batch")
    max_resamples: int = Field(
        3,
        ge=0,
        description="further rounds of prompts a step, for zero_variance_groups=resample; with max_staleness above 0 "
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
    reward_timeout: float = Field(15.0, gt=0, le=MAX_SECONDS, description="seconds one reward may run")
    workers: WorkersConfig | None = Field(
        None, description="where rewards and agents run, and how many at once; null: on this machine"
    )
    n_gold_checks: int | None = Field(64, ge=0, description="gold answers scored before step 0; null: all, 0: none")
    agent_sampling: AgentSampling = Field(
        "override",
        description="what becomes of an agent's own temperature, top_p and the like: override samples with gconfig's, "
        "refuse ends the run, allow samples as asked, corrects for the temperature, and counts what is not corrected",
    )
    dump_groups: int = Field(1, ge=0, description="groups a step written to trajectories.jsonl")
    servers: list[str] | None = Field(
        None, description="URLs of inference servers that sample the answers; null: the in-process generator"
    )
    launch: LaunchConfig | None = Field(
        None, description="inference servers that the run starts and ends itself, in place of servers"
    )
    push: PushConfig | None = Field(None, description="of weights to the servers; null: its defaults")

    renamed: ClassVar[Mapping[str, str]] = {
        "max_refills": "rollout.max_resamples",
        "reward_workers": "rollout.workers.rewards",
    }


class EvaluationConfig(StrictModel):
    """Reward on held-out prompts."""

    every: int = Field(20, ge=0, description="steps between evaluations; 0: only before the first and after the last")
    max_prompts: int | None = Field(None, ge=1, description="held-out prompts used; null: all")
    n_samples: int = Field(1, ge=1, le=2**20, description="sampled answers a prompt")
    temperature: float = Field(1.0, ge=1e-3, description="of the sampled answers")
    greedy: bool = Field(True, description="also the reward of the most likely answer")
    well_formed: str | None = Field(
        None, description="regular expression of a well-formed answer; its share is reported"
    )

    @model_validator(mode="after")
    def _check_well_formed(self) -> EvaluationConfig:
        try:
            re.compile(self.well_formed or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"well_formed: {self.well_formed!r} is not a regular expression: {error}") from None
        return self


class LogprobCheckConfig(StrictModel):
    """Checks on every batch that generator and trainer compute the same logprobs."""

    max_mismatch: float | None = Field(
        None, gt=0, description="largest mean |logprob difference|; null: the dtype's own limit"
    )


class ControlConfig(StrictModel):
    """Controls for experiments."""

    shuffle_rewards: bool = Field(False, description="permute rewards over the batch: a run that must learn nothing")


class DemonstrationsConfig(StrictModel):
    """Expert answers that policy losses `mix` and `chord` train on together with the policy's own."""

    data: DatasetConfig = Field(description="conversations, or prompts and responses, as for SFT")
    per_step: int = Field(ge=1, description="rows added to each step's batch")


class ExperiencesConfig(StrictModel):
    """What processes that explore, train or bench on their own share."""

    path: str | None = Field(None, description="SQLite file of the experience buffer; modes explore and train need it")
    passes: int = Field(1, ge=1, description="mode train: how often each group is trained on")
    wait_seconds: float = Field(
        1800.0, gt=0, le=MAX_SECONDS, description="mode train: how long to wait for the groups of a step"
    )
    weights_from: str | None = Field(
        None, description="modes explore and bench: folder of the run whose checkpoints are loaded; null: none"
    )
    sync_every: int = Field(1, ge=1, description="mode explore: steps between looks for a newer checkpoint")
    latest_only: bool = Field(False, description="mode bench: only the latest checkpoint")


class TeacherServerConfig(StrictModel):
    """A teacher behind an OpenAI endpoint whose completions return the logprobs of the prompt (`echo`)."""

    url: str = Field(description="base URL, which ends in /v1")
    model: str = Field("", description="name of the model there")
    max_concurrent: int = Field(16, ge=1, description="requests at once")


class ResolvedRL(StrictModel):
    """The parts of a run that depend on others, completely configured."""

    actor: EngineConfig = Field(description="the policy")
    ref: EngineConfig | None = Field(description="the reference model; null where no KL is taken")
    critic: EngineConfig | None = Field(description="the critic; null where the advantage needs none")
    teacher: EngineConfig | TeacherServerConfig | None = Field(description="the teacher; null where none is needed")
    algorithm: AlgorithmConfig = Field(description="the objective")


class RLConfig(StrictModel):
    """Reinforcement learning of one policy."""

    run_dir: str = Field(description="folder of the run: metrics, trajectories, checkpoints, export")
    resume: bool = Field(False, description="continue from the run's newest checkpoint, if there is one")
    seed: int = Field(0, ge=0, lt=2**63, description="every random stream of the run derives from it")
    mode: Literal["both", "explore", "train", "bench"] = Field(
        "both",
        description="both sample and train; explore: sample only, into the experience buffer; train: on that buffer; "
        "bench: evaluate checkpoints",
    )
    experiences: ExperiencesConfig | None = Field(None, description="of every mode other than both")
    total_steps: int = Field(100, ge=1, description="rollout-and-update rounds")
    actor: EngineConfig = Field(description="the policy")
    ref: dict[str, Any] | None = Field(
        None,
        description="the reference model of the KL term: the fields in which it differs from the actor, such as path; "
        "not loaded where algorithm.kl.coef is 0",
    )
    critic: dict[str, Any] | None = Field(
        None,
        description="the critic of advantage gae: the fields in which it differs from the actor, such as optimizer.lr; "
        "a policy's checkpoint gets a new value head",
    )
    teacher: dict[str, Any] | None = Field(
        None,
        description="the teacher of advantage distill: the fields in which it differs from the actor, such as path; or "
        "the url of a server that returns logprobs of prompts, with the name of its model",
    )
    tokenizer: str | None = Field(None, description="tokenizer folder; null: the actor's")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="the objective")
    gconfig: GenerationHyperparameters = Field(
        default_factory=lambda: GenerationHyperparameters(n_samples=8), description="sampling of training answers"
    )
    generator: GeneratorConfig | None = Field(None, description="the in-process generator; null: its defaults")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="gathering of a batch")
    train_data: DatasetConfig = Field(description="prompts to train on")
    curriculum_column: str | None = Field(
        None, description="column of difficulty: each epoch begins with the smallest numbers; null: shuffled"
    )
    eval_data: DatasetConfig | None = Field(None, description="held-out prompts")
    demonstrations: DemonstrationsConfig | None = Field(
        None, description="expert answers, for the policy losses that train on them"
    )
    reward: str = Field(description="name or dotted path of the reward function; an environment has its own")
    workflow: str = Field(
        "archon.rl.RLVRWorkflow",
        description="dotted path of the workflow, or an environment: textarena:2048-v0",
    )
    workflow_args: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of its constructor, such as max_turns"
    )
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="held-out evaluation")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="where metrics are sent as well")
    logprob_check: LogprobCheckConfig = Field(
        default_factory=LogprobCheckConfig, description="do trainer and generator agree"
    )
    verify_export: bool = Field(False, description="compare the export's float32 logits in transformers")
    control: ControlConfig = Field(default_factory=ControlConfig, description="controls for experiments")
    bootstrap: BootstrapFile = Field(
        None, description="file of `archon bootstrap` that makes the actor's checkpoint first, if it is not there"
    )

    renamed: ClassVar[Mapping[str, str]] = {"gate": "logprob_check, and gate.limit logprob_check.max_mismatch"}

    @model_validator(mode="before")
    @classmethod
    def _set_environment_reward(cls, data: Any) -> Any:
        """Sets the reward of a workflow that has its own to the workflow's name; another one is refused."""
        workflow = data.get("workflow") if isinstance(data, Mapping) else None
        if not isinstance(workflow, str) or parse_environment(workflow) is None:
            return data
        if data.get("reward", workflow) != workflow:
            raise ValueError(
                f"reward is {data['reward']!r}, and workflow {workflow} is an environment that scores its own "
                "episodes; leave reward out"
            )
        return {**data, "reward": workflow}

    @property
    def verifies_gold(self) -> bool:
        """Whether gold answers are scored before step 0: an environment that scores its own episodes has none."""
        return self.rollout.n_gold_checks != 0 and self.reward != self.workflow

    @property
    def optimizer_steps(self) -> int | None:
        """How many steps the optimizers take, of all minibatches and passes over them; None: there are none."""
        if self.mode in ("explore", "bench"):
            return None
        return self.total_steps * self.algorithm.ppo_epochs * self.algorithm.minibatches

    def resolve(self) -> ResolvedRL:
        """Returns the models and the objective with the values that they take from the actor and other sections."""
        algorithm, ref, critic = self.algorithm, None, None
        if isinstance(algorithm.aggregation, DrGRPOAggregation) and algorithm.aggregation.max_tokens is None:
            length = {"max_tokens": self.gconfig.max_new_tokens}
            aggregation = algorithm.aggregation.model_copy(update=length)
            algorithm = algorithm.model_copy(update={"aggregation": aggregation})
        if self.ref is not None:
            ref = derive_reference(self.actor, self.ref, "ref")
        if self.critic is not None:
            critic = derive_critic(self.actor, self.critic, "critic")
        needed = ref if algorithm.kl.coef > 0 else None
        return ResolvedRL(
            actor=self.actor, ref=needed, critic=critic, teacher=self._resolve_teacher(), algorithm=algorithm
        )

    def _resolve_teacher(self) -> EngineConfig | TeacherServerConfig | None:
        if self.teacher is None:
            return None
        if "url" in self.teacher:
            return TeacherServerConfig.parse(self.teacher, source="teacher")
        if "path" not in self.teacher:
            raise ValueError("teacher: neither path nor url is given; set teacher.path to the checkpoint that teaches")
        return derive_reference(self.actor, {"init_from_scratch": False, **self.teacher}, "teacher")

    def _check_mode(self) -> None:
        if (self.mode == "both") != (self.experiences is None):
            missing = "not " if self.experiences is None else ""
            raise ValueError(f"mode is {self.mode}, and experiences are {missing}set; they are of the other modes")
        if self.mode in ("explore", "train") and self.experiences and self.experiences.path is None:
            raise ValueError(f"mode is {self.mode}, which needs the file of the buffer: set experiences.path")
        if self.mode == "bench" and self.eval_data is None:
            raise ValueError("mode is bench, which evaluates: set eval_data")
        if self.mode != "both" and self.rollout.max_staleness:
            raise ValueError(
                f"rollout.max_staleness is {self.rollout.max_staleness}, and mode {self.mode}; only mode both overlaps "
                "rollout and training in one process, set it to 0"
            )

    @model_validator(mode="after")
    def _check_sections(self) -> RLConfig:
        algorithm, n_samples = self.algorithm, self.gconfig.n_samples
        if self.actor.lora is not None and self.actor.lora.loras is not None:
            raise ValueError("actor.lora.loras names several adapters, and a run trains one policy; set lora.rank")
        if algorithm.kl.coef > 0 and self.ref is None:
            raise ValueError(
                f"algorithm.kl.coef is {algorithm.kl.coef}, which needs a reference model: set `ref` ({{}} is the "
                "actor as it begins, without adapters), or algorithm.kl.coef=0"
            )
        if algorithm.advantage.is_group_relative and n_samples < 2:
            raise ValueError(f"gconfig.n_samples is {n_samples}; a group needs at least 2 answers to differ in reward")
        if algorithm.zero_variance_groups != "keep" and n_samples < 2:
            raise ValueError(
                f"algorithm.zero_variance_groups = {algorithm.zero_variance_groups} would leave nothing, as a "
                f"group is one answer (gconfig.n_samples = {n_samples}); set it to keep"
            )
        if algorithm.advantage.needs_critic and self.critic is None:
            raise ValueError(
                f"algorithm.advantage is {algorithm.advantage.kind}, which needs a critic: set `critic`, such as "
                "critic.optimizer.lr=…"
            )
        if self.critic is not None and not algorithm.advantage.needs_critic:
            raise ValueError(
                f"a critic is set, and algorithm.advantage {algorithm.advantage.kind!r} has no use for it; remove "
                "`critic`, or set algorithm.advantage=gae"
            )
        if algorithm.advantage.needs_teacher and self.teacher is None:
            raise ValueError(
                f"algorithm.advantage is {algorithm.advantage.kind}, which needs a teacher: set teacher.path to its "
                "checkpoint, or teacher.url to a server"
            )
        if self.teacher is not None and not algorithm.advantage.needs_teacher:
            raise ValueError(
                f"a teacher is set, and algorithm.advantage {algorithm.advantage.kind!r} has no use for it; remove "
                "`teacher`, or set algorithm.advantage=distill"
            )
        if self.teacher is not None and "url" in self.teacher and self.gconfig.temperature != 1:
            raise ValueError(
                f"gconfig.temperature is {self.gconfig.temperature}, and teacher.url returns logprobs at temperature 1 "
                "only; set gconfig.temperature=1, or teach in process with teacher.path"
            )
        if self.teacher is not None and "url" in self.teacher and self.rollout.agent_sampling == "allow":
            raise ValueError(
                "rollout.agent_sampling is allow, by which agents choose temperatures, and teacher.url returns "
                "logprobs at temperature 1 only; set rollout.agent_sampling=override, or teach in process with "
                "teacher.path"
            )
        self._check_mode()
        if algorithm.policy_loss.uses_demonstrations != (self.demonstrations is not None):
            missing = "not " if self.demonstrations is None else ""
            raise ValueError(
                f"algorithm.policy_loss is {algorithm.policy_loss.kind}, and demonstrations are {missing}set; policy "
                "losses mix and chord train on them, others do not"
            )
        if self.demonstrations is not None and (self.critic is not None or self.teacher is not None):
            raise ValueError("demonstrations have neither values nor a teacher; remove `critic` and `teacher`")
        if self.gconfig.seed is not None:
            raise ValueError("gconfig.seed would make all answers of a run equal; set `seed`")
        if self.verify_export and self.actor.dtype == "bfloat16":
            raise ValueError(
                "verify_export compares float32 logits, and actor.dtype is bfloat16, whose rounding is larger than any "
                "difference allowed; set verify_export=false, or actor.dtype=float32"
            )
        check_recomputable(self.gconfig, self.gconfig.temperature)
        self._check_servers()
        self.resolve()
        return self

    def _check_servers(self) -> None:
        rollout = self.rollout
        if rollout.servers is not None and rollout.launch is not None:
            raise ValueError("rollout.servers and rollout.launch are set; name servers that run, or launch some")
        if rollout.servers is None and rollout.launch is None:
            if rollout.push is not None:
                raise ValueError("rollout.push is set, and rollout.servers are not; it is of weights that go to them")
            return
        data = "rollout.servers" if rollout.launch is None else "rollout.launch"
        others = {} if self.generator is None else self.generator.model_dump(exclude_defaults=True)
        others.pop("record_experts", None)
        if others:
            raise ValueError(
                f"generator.{min(others)} is set, and {data} sample instead of it; of that section servers follow "
                "record_experts alone"
            )
        if self.mode != "both":
            raise ValueError(f"mode is {self.mode}, and {data} is set; only mode both pushes weights to servers")
        if self.verify_export and parse_layout(self.actor.layout).world_size > 1:
            raise ValueError(
                f"verify_export compares the generator's copy of the model, and with {data} and actor.layout "
                f"{self.actor.layout} no process has one; set verify_export=false"
            )
        shared = None if rollout.push is None else rollout.push.folder
        if rollout.launch is not None and rollout.launch.launcher != "local" and shared is None:
            raise ValueError(
                f"rollout.launch.launcher is {rollout.launch.launcher}, whose servers are on other machines; set "
                "rollout.push.folder to a folder that all of them share"
            )
