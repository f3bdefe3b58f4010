"""RL trainer: a step samples answers, scores them, updates the policy and pushes its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from archon.checkpoint.tokenizer import load_tokenizer
from archon.data import encode_prompt
from archon.data.config import DatasetConfig
from archon.data.image_files import save_images
from archon.data.image_rows import open_reader
from archon.data.images import ImageReader
from archon.data.registry import load_rows
from archon.engine.build import require_exportable, resolve_device
from archon.engine.engine import ArchonEngine
from archon.engine.reference import open_reference
from archon.generation.types import GeneratorConfig
from archon.parallel.control_plane import ControlPlane
from archon.parallel.layout import parse_layout
from archon.remote.config import WorkersConfig
from archon.rl.agent_sampling import SamplingPolicy
from archon.rl.algorithms.config import GroupRule
from archon.rl.asynchronous import AsyncRollout, GatheredBatch
from archon.rl.config import RewardModelConfig, RLConfig
from archon.rl.controller import Controller
from archon.rl.demonstrations import Demonstrations
from archon.rl.environment_update import ENVIRONMENT_IDS, EnvironmentUpdate
from archon.rl.evaluation import evaluate, evaluation_workflows, sampled_gconfig
from archon.rl.export import LOGIT_TOLERANCE, export_difference, require_exact_export
from archon.rl.logprob_check import check_mismatch, check_recomputable, mismatch_limit
from archon.rl.monitor import Monitor
from archon.rl.prompts import Prompt, PromptStream, require_environments
from archon.rl.rewards import AsyncRewardWrapper, averify_gold, gold_scores
from archon.rl.rewards.lookup import is_verifier, reward_name
from archon.rl.rewards.reward_model import RewardModel
from archon.rl.rewards.trl import per_answer
from archon.rl.rollout import Rollout, RolloutBatch
from archon.rl.servers import open_servers
from archon.rl.summary import StallMonitor, batch_metrics, newest_record, reward_gains, write_groups
from archon.rl.teacher import open_teacher
from archon.rl.update import PolicyUpdate
from archon.rl.weight_sync import InProcessSync, RemoteSync, WeightSync, build_inprocess_engine
from archon.rl.workflows import RolloutWorkflow, WorkflowLike, reads_raw_rows, resolve_workflow
from archon.schema.errors import ConfigError
from archon.schema.lazy import import_dotted
from archon.training.batch_sharding import require_documents
from archon.training.loop import (
    BaseTrainer,
    contain_exits,
    freeze_gc,
    require_same_rows,
    run_until_stopped,
    timed,
)
from archon.training.metrics import IMAGES_FOLDER, read_jsonl
from archon.training.python_rows import Rows, config_of_rows
from archon.training.runner import Runner

Result = TypeVar("Result")


class RLTrainer(BaseTrainer):
    """Trainer of one policy. `RLTrainer(config).train()` is a whole run.

    Or without a configuration: `RLTrainer(model="path/to/model", reward=score, train_dataset=rows, run_dir="runs/x")`.

    Args:
        config: the run configuration.
        runner: run directory, logs and signals; None: `train` opens and closes one.
        model: without `config`: checkpoint folder, or fields of the section `actor`.
        reward: without `config`: a function in archon's or TRL's form, or a value of the field `reward`. A resume warns
            if its name (`reward_name`) has changed.
        train_dataset: without `config`: a dataset path, or rows (list, `RowDataset`, Hugging Face dataset).
        eval_dataset: without `config`: held-out rows, as `train_dataset`.
        fields: without `config`: other fields of the configuration, such as `total_steps`.
    """

    mode = "both"
    title = "rl"
    columns: tuple[str, ...] = (
        *("reward", "eval/reward", "eval/greedy_reward", "loss", "grad_norm", "entropy", "length"),
        "samples_per_second",
    )
    config: RLConfig

    def __init__(
        self,
        config: RLConfig | None = None,
        runner: Runner | None = None,
        *,
        model: str | Path | Mapping[str, Any] | None = None,
        reward: Callable[..., Any] | str | Mapping[str, Any] | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        **fields: Any,
    ) -> None:
        self._reward_function = reward if callable(reward) else None
        if callable(reward):
            fields["reward"] = reward_name(reward)
        elif reward is not None:
            fields["reward"] = reward
        datasets = {"train_data": train_dataset, "eval_data": eval_dataset}
        config = config_of_rows(config, RLConfig, "actor", model, datasets, fields)
        if config.mode != self.mode:
            name = type(self).__name__
            raise ConfigError(f"{name} runs mode {self.mode!r}, got mode {config.mode!r}; use make_trainer(config)")
        super().__init__(config, runner)
        self._stall = StallMonitor(config.algorithm.advantage.is_group_relative)
        self.async_rollout: AsyncRollout | None = None  # runs on the controller only
        self.reader: ImageReader | None = None  # None for a text model
        self._raw = False  # whether rows include the source dataset's columns
        self._monitor: Monitor | None = None
        self._newest: dict[str, float] = {}  # metrics of the last step, for the monitor
        self._overlap_seconds = 0.0  # this step: generation during the trainer's computations
        self._waited_seconds = 0.0  # this step: unfinished answers waiting for a push

    def train(
        self,
        workflow: WorkflowLike | None = None,
        eval_workflow: WorkflowLike | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Callable[[dict[str, Any]], bool] | str | None = None,
    ) -> dict[str, float]:
        """Run to `total_steps` or until a signal, and return the newest metrics.

        A signal interrupts a rollout or an evaluation but not an update. Finished updates are saved.

        Args:
            workflow: an instance, a class, a registered name or a dotted path; None: `config.workflow`.
            eval_workflow: workflow for evaluation; None: `workflow` with the sampling of `config.evaluation`.
            workflow_kwargs: constructor arguments of the workflow; None: `config.workflow_args`.
            eval_workflow_kwargs: constructor arguments of `eval_workflow` (None: of a second `workflow`).
            dynamic_filter_fn: a function of a group's tensors (`rewards` [n], …) or its dotted path. A group is
                replaced by another prompt if it returns False, in at most `rollout.max_resamples` rounds.
        """
        opened = self.opened(workflow, eval_workflow, workflow_kwargs, eval_workflow_kwargs, dynamic_filter_fn)
        return self.run(self.config.actor, opened)

    def before_first_step(self) -> dict[str, float]:
        """Run the initial evaluation, or the evaluation a signal interrupted. Return its metrics."""
        assert self.runner is not None
        metrics, record = self.runner.directory.metrics, dict[str, float]()
        if self.step:
            record = self.runner.world.broadcast_json(lambda: newest_record(metrics, self.step))
            if not record or "seconds/evaluate" in record or not self.evaluation_due:
                return {}
        measured = self.timed_evaluation()
        if record and measured:
            self.runner.metrics.truncate(self.step - 1)
        return record | measured if measured else {}

    def after_step(self) -> dict[str, float]:
        """Remember the data position for the next checkpoint."""
        self._cursor = self.prompts.state_dict(self.async_rollout.untrained if self.async_rollout else ())
        if self.async_rollout is not None:
            cursor = self._cursor
            self._cursor = ControlPlane.world().broadcast_json(lambda: cursor)
            if not self.controller.is_main:
                self.prompts.load_state_dict(self._cursor)
        if self.demonstrations is not None:
            self._demonstrations_cursor = self.demonstrations.state_dict()
        return {}

    def train_step(self) -> dict[str, float]:
        """Sample and score a batch, update the policy on it, and push the weights to the generator."""
        seconds: dict[str, float] = {}
        generating, self._overlap_seconds, self._waited_seconds = self.generator.stats.seconds, 0.0, 0.0
        is_trained = False
        # 1. Sample answers and reward them.
        with timed(seconds, "rollout"):
            batch = self.rollout_batch()
        metrics = batch_metrics(batch, self.engine.version)
        if batch:
            # On a shared GPU the generator sleeps from here to the push.
            seconds |= self.weight_sync.sleep()
            if not self._logprobs_checked:
                self._check_logprobs(batch)
            # 2. Compute reference and critic outputs, advantages, and weights of demonstrations.
            with timed(seconds, "score"):
                trajectories = batch.trajectories | self._environment_ids(batch)
                prepared, measured = self._compute(lambda: self.update.prepare(trajectories, self.step))
            self._dump(batch, metrics, prepared["advantages"])
            if self.demonstrations is not None:
                taken = self.demonstrations.take()
                prepared, added = self._compute(lambda: self.update.mix(prepared, taken, self.step))
                measured |= added
            metrics |= measured
            is_trained = bool(prepared["loss_mask"].any())
            if is_trained:
                # 3. Run the optimizer steps. On-policy logprobs before the first step must match the generator's.
                self._mid_update = True
                with timed(seconds, "update"):
                    metrics |= self._compute(lambda: self.update.train(prepared, self.step))
                if batch.is_on_policy(self.generator.version):
                    check_mismatch(metrics["first_logprob_diff"], self._mismatch_limit(batch))
                # 4. Push the new weights.
                with timed(seconds, "push"):
                    metrics |= self._push()
            else:
                self.weight_sync.wake()
            metrics["samples_per_second"] = metrics["samples"] / sum(seconds.values())
        elif batch.dropped:
            self._dump(batch.dropped, metrics)
        if self.async_rollout is not None:
            generated = self.generator.stats.seconds - generating - self._waited_seconds
            metrics["rollout/overlap"] = self._overlap_seconds / generated if generated else 0.0
        metrics["skipped_update"] = float(not is_trained)
        metrics |= {"version": self.engine.version} | {f"seconds/{name}": s for name, s in seconds.items()}
        self._newest = {"step": self.step + 1, **metrics}
        if warning := self._stall.observe(metrics):
            self._log(f"step {self.step + 1}: {warning}")
        return metrics

    def _environment_ids(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Return the column `environment_ids` if the run has environments."""
        if not self.config.environments:
            return {}
        numbers = {name: number for number, name in enumerate(self.config.environments)}
        groups = torch.tensor([numbers[prompt.row["environment"]] for prompt in batch.prompts])
        return {ENVIRONMENT_IDS: groups[batch.trajectories["group_ids"]]}

    def _rule_of(self, prompt: Prompt) -> GroupRule:
        assert self.config.environments is not None
        return self.config.environments[prompt.row["environment"]].algorithm.group_rule

    def _push(self) -> dict[str, float]:
        """Push the new weights to the generator, and return the metrics of the push."""
        self.engine.version += 1
        before, sync = self.generator.stats.seconds, self.weight_sync
        run = sync.push_runner(self._run_during_episodes)
        run(lambda: self.generator.update_weights(sync.weights(), version=self.engine.version))
        self._waited_seconds += self.generator.stats.seconds - before
        return sync.push_metrics()

    def _dump(self, batch: RolloutBatch, metrics: dict[str, float], advantages: Tensor | None = None) -> None:
        """Write the first groups to trajectories.jsonl, and count the rows that cannot be written."""
        if self.runner is None:
            return
        n_groups, writer = self.config.rollout.dump_groups, self.runner.trajectories
        write = None
        if self.reader is not None and self.runner.world.is_main:
            write = partial(save_images, self.runner.directory.path / IMAGES_FOLDER, self.reader)
        lost = write_groups(writer, batch, advantages, n_groups, self.step + 1, self.tokenizer, write)
        metrics["rollout/dump_lost"] = float(lost)

    def rollout_batch(self) -> RolloutBatch:
        """Return the next batch of trajectories."""
        if self.async_rollout is not None:
            unpack = partial(GatheredBatch.unpack, prompt_at=self.prompts.at)
            return self.controller.run(self.async_rollout.gather, GatheredBatch.pack, unpack).batch(
                self.rollout, self.step
            )
        rollout = self.config.rollout
        return self._await(
            self.rollout.collect(
                self.prompts.take,
                rollout.prompts_per_step,
                self.step,
                max_resamples=rollout.max_resamples,
            )
        )

    def evaluate(self) -> dict[str, float]:
        """Return held-out metrics: `eval/…` for sampled answers and `eval/greedy_…` for greedy ones."""
        metrics: dict[str, float] = {}
        for prefix, rollout in self.evaluations.items():
            well_formed = self.config.evaluation.well_formed
            work = partial(evaluate, rollout, self.held_out, tokenizer=self.tokenizer, well_formed=well_formed)
            measured = self.controller.run_json(work) if self._controls_evaluation else self._await(work())
            metrics |= {f"eval/{prefix}{name}": value for name, value in measured.items()}
        return metrics

    def position(self) -> dict[str, Any]:
        """Return the data position after the last complete step, for resuming."""
        position = {"prompts": self._cursor, "reward": str(self.config.reward)}
        return position if self.demonstrations is None else position | {"demonstrations": self._demonstrations_cursor}

    def load_position(self, state: dict[str, Any]) -> None:
        """Continue at a position that `position` returned."""
        self.prompts.load_state_dict(state["prompts"])
        self._cursor = state["prompts"]
        if state.get("reward", reward := str(self.config.reward)) != reward:
            self._log(f"warning: the reward is {reward}; until step {self.step} it was {state['reward']}")
        if self.demonstrations is not None:
            self.demonstrations.load_state_dict(state["demonstrations"])
            self._demonstrations_cursor = state["demonstrations"]

    def finish(self) -> None:
        """Save, export, and log the first and last held-out rewards."""
        assert self.runner is not None
        self.save()
        self.export()
        if self.runner.world.is_main:
            for line in reward_gains(read_jsonl(self.runner.directory.metrics)):
                self.runner.log(line)

    def export(self) -> None:
        """Write the policy as a Hugging Face checkpoint, or its LoRA in PEFT's format.

        With `verify_export`, compare the model's logits with transformers' on the export.
        """
        super().export()
        if not self.config.verify_export:
            return
        assert self.runner is not None
        path = self.runner.directory.export
        documents = [encode_prompt(self.tokenizer, row) for row in self.prompts.rows[:8]]
        if not self.runner.world.is_main:
            return
        difference = export_difference(self.weight_sync.exported_model(), path, documents)
        if difference > LOGIT_TOLERANCE:
            raise RuntimeError(
                f"export {path}: relative logit difference to transformers is {difference:.1e}, "
                f"expected at most {LOGIT_TOLERANCE:.0e}; the export is wrong"
            )
        self.runner.log(f"export {path}: relative logit difference to transformers {difference:.1e}")

    @contextmanager
    def opened(
        self,
        workflow: WorkflowLike | None = None,
        eval_workflow: WorkflowLike | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Callable[[dict[str, Any]], bool] | str | None = None,
    ) -> Iterator[RLTrainer]:
        """Open everything a run needs, from rows to generator, and resume it if configured."""
        config, rollout = self.config, self.config.rollout
        require_exportable(config.actor, "actor")
        if config.verify_export:
            require_exact_export(config.actor)
        self.total_steps, self.eval_every = config.total_steps, config.evaluation.every
        workers = rollout.workers or WorkersConfig()
        with asyncio.Runner() as loop, self._open_reward(workers) as reward:
            # The loop itself, not Runner.run, which would install its own signal handler.
            self._loop = loop.get_loop()
            contain_exits(self._loop)
            self.tokenizer = load_tokenizer(config.tokenizer or config.actor.path, config.actor.path)
            self.reader = open_reader(config.actor)
            workflow = workflow or config.workflow
            self._raw = reads_raw_rows(workflow)
            self._open_data(reward)
            self._open_models()
            self.resume()
            offered = {
                "gconfig": config.gconfig,
                "tokenizer": self.tokenizer,
                "processor": self.reader,
                "train_data": config.train_data,
                "workers": workers,
            }
            if reward is not None:
                offered["reward_fn"] = reward
            arguments = config.workflow_args if workflow_kwargs is None else workflow_kwargs
            trained = resolve_workflow(workflow, arguments, **offered)
            evaluated = None
            if eval_workflow is not None or eval_workflow_kwargs is not None:
                offered["gconfig"] = sampled_gconfig(config)
                evaluated = resolve_workflow(eval_workflow or workflow, eval_workflow_kwargs, **offered)
            accept = dynamic_filter_fn
            if isinstance(accept, str):
                accept = import_dotted(accept, "dynamic_filter_fn")
            self._open_rollouts(trained, evaluated, accept)
            try:
                with freeze_gc():
                    yield self
            finally:
                if self.async_rollout is not None:
                    self._loop.run_until_complete(self.async_rollout.close())
                if self._monitor is not None:
                    self._monitor.close()
                self.weight_sync.close()
                for opened in (self.rollout.workflow, evaluated):
                    if isinstance(opened, RolloutWorkflow):  # duck-typed workflows may lack aclose
                        self._loop.run_until_complete(opened.aclose())

    def _open_reward(self, workers: WorkersConfig) -> AbstractContextManager[AsyncRewardWrapper | None]:
        reward, rollout = self.config.reward, self.config.rollout
        if (function := self._reward_function) is not None:
            return AsyncRewardWrapper(per_answer(function), rollout.reward_timeout, workers.rewards, workers=workers)
        if reward is None:
            return nullcontext()
        if isinstance(reward, RewardModelConfig):
            actor = self.config.actor
            model = RewardModel(reward.model).load(resolve_device(actor.device), getattr(torch, actor.dtype))
            return AsyncRewardWrapper(model, rollout.reward_timeout)
        return AsyncRewardWrapper(reward, rollout.reward_timeout, workers.rewards, workers=workers)

    def section_rows(self, section: str) -> Sequence[dict[str, Any]]:
        """Return the rows of `train_data` or `eval_data`; empty if the section is not configured."""
        configured: DatasetConfig | None = getattr(self.config, section)
        if configured is None:
            return []
        if self._raw:
            configured = configured.model_copy(update={"raw": True})
        return load_rows(configured, "rl", self.tokenizer, self.reader)

    def _open_data(self, reward: AsyncRewardWrapper | None) -> None:
        config = self.config
        rows, held_out = self.section_rows("train_data"), self.section_rows("eval_data")
        for loaded, section in ((rows, config.train_data), (held_out, config.eval_data)):
            if loaded:
                require_same_rows(loaded, section.path if section else "the held-out rows")
        if config.environments:
            require_environments(rows, config.environments)
        self.prompts = PromptStream(rows, config.seed, config.curriculum_column)
        self._cursor = self.prompts.state_dict()
        self.demonstrations = None
        if config.demonstrations is not None:
            self.demonstrations = Demonstrations(config.demonstrations, self.tokenizer, config.seed)
            self._demonstrations_cursor = self.demonstrations.state_dict()
        self.held_out = [Prompt(i, row) for i, row in enumerate(held_out[: config.evaluation.max_prompts])]
        if reward is not None and config.reward != config.workflow and ControlPlane.world().is_main:
            for checked in filter(None, (rows, held_out)):
                self._check_gold(reward, checked)

    def _check_gold(self, reward: AsyncRewardWrapper, rows: Sequence[dict[str, Any]]) -> None:
        """Require that a verifier gives gold answers 1.0; log the scores of other rewards."""
        config, n = self.config, self.config.rollout.n_gold_checks
        if not isinstance(config.reward, str):
            return  # the score of a reward model has no scale
        if is_verifier(config.reward):
            if any(row.get("answer") is not None for row in rows):
                self._await(averify_gold(reward, rows, n))
            return
        scores = list(self._await(gold_scores(reward, rows, n)).values())
        if scores:
            line = f"gold answers score {min(scores):g} to {max(scores):g} with the reward {reward.name}"
            if max(scores) <= 0:
                line += "; warning: none scores above 0: does the reward read the `answer` column of these rows?"
            self._log(line)

    def _open_models(self) -> None:
        config, resolved = self.config, self.config.resolve()
        algorithm = resolved.algorithm
        ranks = parse_layout(config.actor.layout).dp
        answers = config.rollout.prompts_per_step * config.gconfig.n_samples
        require_documents(answers, ranks, "rollout.prompts_per_step * gconfig.n_samples")
        self.engine = ArchonEngine(config.actor)
        steps = config.optimizer_steps
        self.engine.initialize(steps)
        reference = None if resolved.ref is None else open_reference(self.engine, resolved.ref)
        if resolved.critic is not None:
            self.critic = ArchonEngine(resolved.critic)
            self.critic.initialize(steps)
            self.critic.share_base(self.engine)
        for engine in (self.engine, self.critic):
            if engine is not None and self.runner is not None:
                engine.stall_watch.folder = self.runner.directory.stacks
        teacher = None if resolved.teacher is None else open_teacher(resolved.teacher, config, self.tokenizer)
        make_update: Callable[..., PolicyUpdate] = PolicyUpdate
        if config.environments:
            make_update = partial(EnvironmentUpdate, environments=config.resolve_environments())
        self.update = make_update(
            self.engine,
            reference,
            algorithm,
            critic=self.critic,
            teacher=teacher,
            max_new_tokens=config.gconfig.max_new_tokens,
            temperature=config.gconfig.temperature,
            seed=config.seed,
            shuffle_rewards=config.control.shuffle_rewards,
        )
        self._logprobs_checked = False

    def _open_rollouts(
        self,
        trained: RolloutWorkflow,
        evaluated: RolloutWorkflow | None,
        accept: Callable[[dict[str, Any]], bool] | None,
    ) -> None:
        config = self.config
        self.weight_sync = self._open_generator()
        self.generator = self.weight_sync.generator
        self.controller = Controller(self._loop, self.runner)
        temperature = config.gconfig.temperature
        self.rollout = Rollout(
            self.generator,
            trained,
            seed=config.seed,
            n_samples=config.gconfig.n_samples,
            check=lambda gconfig: check_recomputable(gconfig, temperature),
            accept=accept,
            rule=self._rule_of if config.environments else config.algorithm.group_rule,
            agent_sampling=SamplingPolicy(config.rollout.agent_sampling, config.gconfig, self._log),
            log=self._log,
        )
        if config.rollout.max_staleness:
            self.async_rollout = AsyncRollout(
                self.rollout,
                self.prompts.take,
                batch=config.rollout.prompts_per_step,
                staleness=config.rollout.max_staleness,
                concurrent=config.rollout.max_concurrent,
                max_resamples=config.rollout.max_resamples,
            )
        workflows = evaluation_workflows(config, trained, evaluated) if self.held_out else {}
        world = self.weight_sync.evaluation_world(asynchronous=config.rollout.max_staleness > 0)
        self._controls_evaluation = world is not None
        self.evaluations = {
            prefix: Rollout(self.generator, item, seed=config.seed, world=world, log=self._log)
            for prefix, item in workflows.items()
        }

    def _open_generator(self) -> WeightSync:
        config, push = self.config, self.config.rollout.push
        if config.rollout.servers is not None or config.rollout.launch is not None:
            servers = open_servers(config, self.engine, self.tokenizer, self.prompts.rows, self._log)
            if push is not None and push.port is not None and ControlPlane.world().is_main:
                self._monitor = Monitor(push.port, lambda: self._newest, servers)
                self._log(f"metrics for Prometheus at {self._monitor.url}/metrics")
            return RemoteSync(self.engine, servers)
        settings = config.generator or GeneratorConfig()
        generator = build_inprocess_engine(
            self.engine,
            self.tokenizer,
            cache_bytes=None if settings.memory_gib is None else int(settings.memory_gib * 2**30),
            seed=config.seed,
            version=self.engine.version,
            dtype=getattr(torch, config.actor.dtype),
            # Asynchronous rollout needs a copy: training updates the weights during sampling.
            weights="snapshot" if config.rollout.max_staleness else "auto",
            **settings.model_dump(exclude={"memory_gib", "record_experts"}),
        )
        if settings.record_experts:
            generator.record_experts()
        return InProcessSync(self.engine, generator)

    def _await(self, work: Coroutine[Any, Any, Result]) -> Result:
        return run_until_stopped(self._loop, work, self.runner)

    def _compute(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread next to the episodes, and measure the overlap."""
        before = self.generator.stats.seconds
        result = self._run_during_episodes(work)
        self._overlap_seconds += self.generator.stats.seconds - before
        return result

    def _run_during_episodes(self, work: Callable[[], Result]) -> Result:
        if self.async_rollout is None or not self.controller.is_main:
            return work()
        return self._loop.run_until_complete(asyncio.to_thread(work))

    def _log(self, message: str) -> None:
        (self.runner.log if self.runner else print)(message)

    def _check_logprobs(self, batch: RolloutBatch) -> None:
        """Raise unless the importance ratio of the first batch is 1 up to rounding.

        The update itself checks later batches and needs no extra forward pass.
        """
        difference, limit = self.update.logprob_difference(batch.trajectories), self._mismatch_limit(batch)
        check_mismatch(difference, limit)
        self._logprobs_checked = True
        self._log(f"logprob check: mean |Δ logprob| {difference:.1e}, limit {limit:.1e}")

    def _mismatch_limit(self, batch: RolloutBatch) -> float:
        """Return the configured limit, or the dtype's limit at the lowest temperature in the batch."""
        config = self.config
        temperature = config.gconfig.temperature
        if "temperatures" in batch.trajectories:
            column = batch.trajectories["temperatures"]
            temperature = min([temperature, *column[column > 0].tolist()])
        return config.logprob_check.max_mismatch or mismatch_limit(config.actor.dtype, temperature)
