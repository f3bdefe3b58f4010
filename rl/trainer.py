"""Reinforcement learning: generate, score, update, push the weights, and again; or generating while updating."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from archon.checkpoint.hf_io import load_tokenizer
from archon.data import encode_prompt
from archon.data.load import load_rows
from archon.engine.engine import ArchonEngine
from archon.parallel.layout import parse_layout
from archon.parallel.world import World
from archon.rl.asynchronous import RolloutAhead
from archon.rl.config import RLConfig
from archon.rl.evaluation import evaluate, evaluated_workflows
from archon.rl.export import verified_difference
from archon.rl.prompts import Prompt, PromptStream
from archon.rl.replay import check_gate, check_replayable, gate_limit
from archon.rl.rewards import AsyncRewardWrapper, averify_gold
from archon.rl.rollout import Rollout, RolloutBatch
from archon.rl.summary import SpreadWatch, batch_metrics, gains, newest_record, write_groups
from archon.rl.update import PolicyUpdate
from archon.rl.weights import in_process, weights_of
from archon.rl.workflows import RolloutWorkflow, resolve_workflow
from archon.training.loop import (
    due,
    join,
    load_newest,
    long_lived_objects_frozen,
    require_same_rows,
    run_until_stopped,
    save_newest,
    saved_at_the_end,
    timed,
    timed_evaluation,
)
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner, StoppedError
from archon.training.shares import require_documents

Result = TypeVar("Result")

COLUMNS: tuple[str, ...] = ("reward", "eval/reward", "eval/greedy_reward", "loss", "grad_norm", "entropy", "length")
COLUMNS += ("samples_per_second",)


class RLTrainer:
    """Trains one policy. `RLTrainer(config).train()` is the whole run; the parts below can be called one by one.

    Args:
        config: the run.
        runner: the run directory and what surrounds it; made, and closed, by `train` when not given.
    """

    def __init__(self, config: RLConfig, runner: Runner | None = None) -> None:
        self.config = config
        self.runner = runner
        self.step = 0
        self._saved_step: int | None = None
        self._updating = False
        self._spread = SpreadWatch()
        self.ahead: RolloutAhead | None = None
        self._overlapped = 0.0  # seconds of generation while something was computed beside it, in this step

    def train(
        self,
        workflow: RolloutWorkflow | type[RolloutWorkflow] | str | None = None,
        eval_workflow: RolloutWorkflow | None = None,
    ) -> dict[str, float]:
        """Run to `total_steps`, or until a signal asks to stop; returns the newest metrics.

        A signal ends a rollout or an evaluation where it is, and lets an update end: what was trained is saved.

        Args:
            workflow: an instance, a class or a dotted string; by default the configuration's.
            eval_workflow: used for evaluation as it is; by default `workflow` with evaluation's sampling values.
        """
        config, metrics = self.config, dict[str, float]()
        with ExitStack() as stack:
            if self.runner is None:
                self.config = config = join(config, config.actor)
                opened = Runner(config.run_dir, config, resume=config.resume, sinks=config.metrics)
                self.runner = stack.enter_context(opened)
            runner = self.runner
            stack.enter_context(suppress(StoppedError))
            stack.enter_context(self.opened(workflow, eval_workflow))
            stack.enter_context(saved_at_the_end(self.save))
            with runner.progress("rl", config.total_steps, start=self.step, columns=COLUMNS) as progress:
                metrics = self._missing_evaluation(runner)
                if metrics:
                    runner.metrics.write(self.step, metrics)
                    progress.update(self.step, metrics)
                while self.step < config.total_steps and not runner.stop_requested:
                    metrics = self.train_step()
                    self.step += 1
                    self._updating, self._cursor = False, self._position()
                    try:
                        if self._evaluation_due():
                            metrics |= timed_evaluation(self.evaluate)
                    finally:
                        runner.metrics.write(self.step, metrics)
                    progress.update(self.step, metrics)
                    if due(self.step, config.checkpoint.every):
                        self.save(asynchronous=True)
            if self.step == config.total_steps:
                self.finish()
        return metrics

    def _missing_evaluation(self, runner: Runner) -> dict[str, float]:
        """The record of the step the run begins at: step 0's, or one whose evaluation a signal broke off; else {}."""
        record: dict[str, float] = {}
        if self.step:
            record = runner.world.tell(lambda: newest_record(runner.directory.metrics, self.step))
            if not record or "seconds/evaluate" in record or not self._evaluation_due():
                return {}
        measured = timed_evaluation(self.evaluate)
        if record and measured:
            runner.metrics.truncate(self.step - 1)
        return record | measured if measured else {}

    def _evaluation_due(self) -> bool:
        return self.step == self.config.total_steps or due(self.step, self.config.evaluation.every)

    def train_step(self) -> dict[str, float]:
        """One round: generate and score a batch, update the policy on it, push the weights to the generator."""
        seconds: dict[str, float] = {}
        generating, self._overlapped = self.generator.stats.seconds, 0.0
        with timed(seconds, "rollout"):
            batch = self.rollout_batch()
        metrics = batch_metrics(batch, self.engine.version)
        if self.config.algorithm.advantage.compares_group and (warning := self._spread.see(metrics)):
            self._log(f"step {self.step}: {warning}")
        if batch:
            if not self._gate_passed:
                self._pass_gate(batch)
            with timed(seconds, "score"):
                prepared, measured = self._beside(lambda: self.update.prepare(batch.trajectories, self.step))
            self._dump(batch, metrics, prepared["advantages"])
            self._updating = True
            with timed(seconds, "update"):
                metrics |= measured | self._beside(lambda: self.update.train(prepared, self.step))
            if batch.is_of(self.generator.version):
                check_gate(metrics["first_logprob_diff"], self._gate_limit)
            with timed(seconds, "push"):
                self.engine.version += 1
                self.generator.update_weights(weights_of(self.engine), version=self.engine.version)
            metrics["samples_per_second"] = metrics["samples"] / sum(seconds.values())
        elif batch.dropped:
            self._dump(batch.dropped, metrics)
        if self.ahead is not None:
            generated = self.generator.stats.seconds - generating
            metrics["rollout/overlap"] = self._overlapped / generated if generated else 0.0
        metrics["skipped_update"] = float(not batch)
        return metrics | {"version": self.engine.version} | {f"seconds/{name}": s for name, s in seconds.items()}

    def _dump(self, batch: RolloutBatch, metrics: dict[str, float], advantages: Tensor | None = None) -> None:
        """Write some groups out; what the disk did not take is a number of the step, and no reason to end the run."""
        if self.runner is None:
            return
        n_groups, writer = self.config.rollout.dump_groups, self.runner.trajectories
        metrics["rollout/dump_lost"] = float(
            write_groups(writer, batch, advantages, n_groups, self.step + 1, self.tokenizer)
        )

    def rollout_batch(self) -> RolloutBatch:
        """The next batch of trajectories, from the next prompts of the stream."""
        if self.ahead is not None:
            return self._await(self.ahead.collect(self.step))
        algorithm, rollout = self.config.algorithm, self.config.rollout
        return self._await(
            self.rollout.collect(
                self.prompts.take,
                rollout.prompts_per_step,
                self.step,
                zero_variance_groups=algorithm.zero_variance_groups,
                max_resamples=rollout.max_resamples,
            )
        )

    def evaluate(self) -> dict[str, float]:
        """`eval/reward` and what comes with it (see `evaluation.evaluate`), and the same as `eval/greedy_…`."""
        metrics: dict[str, float] = {}
        for prefix, rollout in self.evaluations.items():
            measured = self._await(
                evaluate(
                    rollout, self.held_out, tokenizer=self.tokenizer, well_formed=self.config.evaluation.well_formed
                )
            )
            metrics |= {f"eval/{prefix}{name}": value for name, value in measured.items()}
        return metrics

    def save(self, *, asynchronous: bool = False) -> None:
        """Checkpoint everything a bitwise resume needs; `asynchronous` writes it during the next steps.

        A step that an error ended before its update is as if it had not begun: its prompts are trained on after a
        resume. Nothing is written, but what is being written waited for, when this step's checkpoint is there already,
        or when the error struck inside the update, which leaves weights that belong to no step.
        """
        assert self.runner is not None
        if self._saved_step == self.step or self._updating:
            self.engine.wait_for_saves()
            return
        state, keep = {"prompts": self._cursor}, self.config.checkpoint.keep
        save_newest(self.runner, self.engine, self.step, state, keep, critic=self.critic, asynchronous=asynchronous)
        self._saved_step = self.step

    def finish(self) -> None:
        """Save, export, and say what the run has brought on the held-out prompts."""
        assert self.runner is not None
        self.save()
        self.export()
        if self.runner.world.is_main:
            for line in gains(read_jsonl(self.runner.directory.metrics)):
                self.runner.log(line)

    def export(self) -> None:
        """Write the policy as a Hugging Face checkpoint; with `verify_export`, check its logits in transformers."""
        assert self.runner is not None
        path = self.runner.directory.export
        self.engine.save(path)
        if not self.config.verify_export:
            return
        documents = [encode_prompt(self.tokenizer, row) for row in self.prompts.rows[:8]]
        if not self.runner.world.is_main:
            return
        # Of a model that lies on several processes the generator holds the whole.
        model = self.engine.whole_model if self.runner.world.size == 1 else self.generator.model
        difference = verified_difference(model, path, documents)
        self.runner.log(f"export {path}: logits differ from transformers' by {difference:.1e} (relative)")

    @contextmanager
    def opened(
        self,
        workflow: RolloutWorkflow | type[RolloutWorkflow] | str | None = None,
        eval_workflow: RolloutWorkflow | None = None,
    ) -> Iterator[RLTrainer]:
        """Everything the run needs, from rows to generator, resumed where the configuration asks for it."""
        config, rollout = self.config, self.config.rollout
        wrapper = AsyncRewardWrapper(config.reward, rollout.reward_timeout, rollout.reward_workers)
        with asyncio.Runner() as loop, wrapper as reward:
            # The loop itself, not Runner.run: signals belong to the run directory's handler.
            self._loop = loop.get_loop()
            self.tokenizer = load_tokenizer(config.tokenizer or config.actor.path)
            self._open_data(reward)
            self._open_models()
            self._resume()
            self._open_rollouts(reward, workflow or config.workflow, eval_workflow)
            try:
                with long_lived_objects_frozen():
                    yield self
            finally:
                if self.ahead is not None:
                    self._loop.run_until_complete(self.ahead.close())

    def _open_data(self, reward: AsyncRewardWrapper) -> None:
        config = self.config
        rows = load_rows(config.train_data, "rl", self.tokenizer)
        held_out = load_rows(config.eval_data, "rl", self.tokenizer) if config.eval_data else []
        for loaded, section in ((rows, config.train_data), (held_out, config.eval_data)):
            if loaded and section:
                require_same_rows(loaded, section.path)
        self.prompts = PromptStream(rows, config.seed)
        self._cursor = self.prompts.state_dict()
        self.held_out = [Prompt(i, row) for i, row in enumerate(held_out[: config.evaluation.max_prompts])]
        if config.rollout.gold_checked != 0 and World.now().is_main:
            for checked in filter(None, (rows, held_out)):
                self._await(averify_gold(reward, checked, config.rollout.gold_checked))

    def _open_models(self) -> None:
        config, resolved = self.config, self.config.resolve()
        algorithm = resolved.algorithm
        ranks = parse_layout(config.actor.layout).dp
        answers = config.rollout.prompts_per_step * config.gconfig.n_samples
        require_documents(answers, ranks, "rollout.prompts_per_step * gconfig.n_samples")
        self.engine = ArchonEngine(config.actor)
        steps = config.total_steps * algorithm.ppo_epochs * algorithm.minibatches
        self.engine.initialize(steps)
        if self.runner is not None:
            self.engine.stacks = self.runner.directory.stacks
        reference = None
        if resolved.ref is not None:
            reference = ArchonEngine(resolved.ref)
            reference.initialize()
        self.critic = None
        if resolved.critic is not None:
            self.critic = ArchonEngine(resolved.critic)
            self.critic.initialize(steps)
        self.update = PolicyUpdate(
            self.engine,
            reference,
            algorithm,
            critic=self.critic,
            max_new_tokens=config.gconfig.max_new_tokens,
            temperature=config.gconfig.temperature,
            seed=config.seed,
            shuffle_rewards=config.control.shuffle_rewards,
        )
        self._gate_passed = False
        self._gate_limit = config.logprob_check.max_mismatch or gate_limit(
            config.actor.dtype, config.gconfig.temperature
        )

    def _open_rollouts(
        self,
        reward: AsyncRewardWrapper,
        workflow: RolloutWorkflow | type[RolloutWorkflow] | str,
        eval_workflow: RolloutWorkflow | None,
    ) -> None:
        config = self.config
        memory = config.generator.memory_gib
        self.generator = in_process(
            self.engine,
            self.tokenizer,
            cache_bytes=None if memory is None else int(memory * 2**30),
            seed=config.seed,
            version=self.engine.version,
            dtype=getattr(torch, config.actor.dtype),
            # Weights that are being updated cannot be sampled from.
            weights="snapshot" if config.rollout.max_staleness else "auto",
            **config.generator.model_dump(exclude={"memory_gib"}),
        )
        trained = resolve_workflow(
            workflow, config.workflow_args, reward_fn=reward, gconfig=config.gconfig, tokenizer=self.tokenizer
        )
        temperature = config.gconfig.temperature
        self.rollout = Rollout(
            self.generator,
            trained,
            seed=config.seed,
            n_samples=config.gconfig.n_samples,
            check=lambda gconfig: check_replayable(gconfig, temperature),
            log=self._log,
        )
        if config.rollout.max_staleness:
            self.ahead = RolloutAhead(
                self.rollout,
                self.prompts.take,
                batch=config.rollout.prompts_per_step,
                staleness=config.rollout.max_staleness,
                concurrent=config.rollout.max_concurrent,
                zero_variance_groups=config.algorithm.zero_variance_groups,
                max_resamples=config.rollout.max_resamples,
            )
        evaluated = evaluated_workflows(config, trained, eval_workflow) if self.held_out else {}
        self.evaluations = {
            prefix: Rollout(self.generator, item, seed=config.seed, log=self._log) for prefix, item in evaluated.items()
        }

    def _resume(self) -> None:
        """Go on from the newest checkpoint where the configuration asks for it and there is one."""
        if not self.config.resume or self.runner is None:
            return
        found = load_newest(self.runner, self.engine, self.critic)
        if found is not None:
            self.step, state = found
            self._saved_step = self.step
            self.prompts.load_state_dict(state["prompts"])
            self._cursor = state["prompts"]
        # At step 0 all records go: the evaluation before the first step is about to be repeated as well.
        self.runner.rewind(self.step or -1)

    def _position(self) -> dict[str, Any]:
        """Where the data stream stands, prompts that were taken and not trained on included."""
        return self.prompts.state_dict(self.ahead.ahead if self.ahead else ())

    def _await(self, work: Coroutine[Any, Any, Result]) -> Result:
        return run_until_stopped(self._loop, work, self.runner)

    def _beside(self, work: Callable[[], Result]) -> Result:
        """Do this; while rollouts run ahead, in a thread, so that they go on."""
        if self.ahead is None:
            return work()
        before = self.generator.stats.seconds
        result = self._loop.run_until_complete(asyncio.to_thread(work))
        self._overlapped += self.generator.stats.seconds - before
        return result

    def _log(self, message: str) -> None:
        (self.runner.log if self.runner else print)(message)

    def _pass_gate(self, batch: RolloutBatch) -> None:
        """Refuse to train unless the first batch's importance ratio is 1 up to rounding.

        Later batches are checked by what their update computes anyway, which costs no forward of its own; an error
        then leaves the newest checkpoint as the state to go on from.
        """
        difference = self.update.logprob_difference(batch.trajectories)
        check_gate(difference, self._gate_limit)
        self._gate_passed = True
        self._log(f"ratio gate: mean |Δ logprob| {difference:.1e}, limit {self._gate_limit:.1e}")
