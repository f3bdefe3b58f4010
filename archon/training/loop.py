"""The run loop that all trainers share: open, resume, step, evaluate, record, save, export."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from archon.checkpoint.native import broadcast_latest_checkpoint, open_state
from archon.checkpoint.state_tree import read_all
from archon.checkpoint.tokenizer import save_run_tokenizer
from archon.data import RowLoader
from archon.engine.agreement import require_same_files, require_same_inputs, require_same_run
from archon.engine.build import resolve_device
from archon.engine.engine import ArchonEngine
from archon.parallel.control_plane import ControlPlane
from archon.parallel.layout import parse_layout
from archon.parallel.process_group import join_process_group
from archon.schema.config import EngineConfig, StrictModel
from archon.schema.errors import CheckpointError
from archon.schema.user_code import ExitError, exit_message
from archon.training.runner import Runner, StoppedError

Config = TypeVar("Config", bound=StrictModel)
Result = TypeVar("Result")

GC_THRESHOLD = 10_000
"""New objects between garbage collections of a run; the default of Python is 700, or 2,000 in newer versions."""


class BaseTrainer:
    """One training run, executed by `run`. A subclass defines the step, the evaluation and the saved position.

    When a subclass is opened, it sets `engine`, `total_steps`, `eval_every` (steps between evaluations; 0: only after
    the last) and an optional `critic`. `config` has `run_dir`, `resume`, `metrics` and `checkpoint`.
    """

    title: str
    columns: tuple[str, ...]
    config: Any
    tokenizer: Any
    engine: ArchonEngine
    critic: ArchonEngine | None = None
    total_steps = 0
    eval_every = 0

    def __init__(self, config: StrictModel, runner: Runner | None = None) -> None:
        self.config = config
        self.runner = runner
        self.step = 0
        self._saved_step: int | None = None
        self._tokenizer_saved = False
        self._mid_update = False  # True while the weights are between two steps

    def run(self, model: EngineConfig, opened: AbstractContextManager[Any]) -> dict[str, float]:
        """Run to the last step, or until a signal asks to stop. Returns the newest metrics.

        Args:
            model: the trained model's configuration; its layout sets the number of processes.
            opened: holds the models and data of the run; entered once the run directory is locked.
        """
        metrics: dict[str, float] = {}
        with ExitStack() as stack:
            if self.runner is None:
                self.config = config = join_processes(self.config, model)
                self.runner = stack.enter_context(
                    Runner(config.run_dir, config, resume=config.resume, sinks=config.metrics)
                )
            runner = self.runner
            require_same_inputs(self.config)
            stack.enter_context(suppress(StoppedError))
            stack.enter_context(opened)
            stack.push(self._save_at_exit)
            with runner.progress(self.title, self.total_steps, start=self.step, columns=self.columns) as progress:
                metrics = self.before_first_step()
                if metrics:
                    runner.metrics.write(self.step, metrics)
                    progress.update(self.step, metrics)
                while not self.finished and not runner.stop_requested:
                    metrics = self.train_step()
                    self.step += 1
                    self._mid_update = False
                    try:
                        metrics |= self.after_step()
                        if self.evaluation_due:
                            metrics |= self.timed_evaluation()
                    finally:
                        runner.metrics.write(self.step, metrics)
                    progress.update(self.step, metrics)
                    if self._is_due(self.config.checkpoint.every):
                        self.save(asynchronous=True)
            if self.finished:
                self.finish()
        return metrics

    def _save_at_exit(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Save, also after an error or Ctrl-C, but not after an error of one of several processes: all must save."""
        if kind in (None, StoppedError) or ControlPlane.world().size == 1:
            self.save()

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.total_steps

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation follows the current step."""
        return self.finished or self._is_due(self.eval_every)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def train_step(self) -> dict[str, float]:
        """Run one step and return its metrics. Sets `_mid_update` before it first changes a weight."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Return the held-out metrics; {} without held-out data."""
        raise NotImplementedError

    def timed_evaluation(self) -> dict[str, float]:
        """Return the metrics of `evaluate` and `seconds/evaluate`; {} without held-out data."""
        seconds: dict[str, float] = {}
        with timed(seconds, "seconds/evaluate"):
            measured = self.evaluate()
        return measured | seconds if measured else {}

    def before_first_step(self) -> dict[str, float]:
        """Return the metrics to record before the first step; {} for none."""
        return {}

    def after_step(self) -> dict[str, float]:
        """Return further metrics of a step, before its evaluation."""
        return {}

    def position(self) -> dict[str, Any]:
        """Return the position in the data, which a checkpoint contains besides the engines."""
        raise NotImplementedError

    def load_position(self, state: dict[str, Any]) -> None:
        """Restore the position that `position` returned."""
        raise NotImplementedError

    def resume(self) -> None:
        """Load the newest checkpoint if the configuration has `resume` and there is one; its layout may differ."""
        runner = self.runner
        if not self.config.resume or runner is None:
            return
        folder = broadcast_latest_checkpoint(runner.directory.checkpoints)
        if folder is None:
            runner.log(f"resume=true, and {runner.directory.path} holds no checkpoint: the run begins at step 0")
        else:
            require_same_files(folder)
            with open_state(folder, self.engine.fingerprint) as (step, state):
                self.engine.load_state_dict(state.pop("engine"))
                if self.critic is not None:
                    if "critic" not in state:
                        raise CheckpointError(
                            f"{folder}: the checkpoint has no critic; was algorithm.advantage changed?"
                        )
                    expected = self.critic.fingerprint if self.critic.lora else None
                    saved = read_all(state.pop("critic_fingerprint", None))
                    if saved != expected:
                        reason = "the critic's LoRA there has other sizes or another base"
                        if saved is None or expected is None:
                            there, here = ("all weights" if x is None else "a LoRA" for x in (saved, expected))
                            reason = f"the critic trains {there} there and {here} here"
                        raise CheckpointError(f"{folder}: {reason}; was critic changed?")
                    self.critic.load_state_dict(state.pop("critic"))
                position = read_all(state)
            runner.log(f"resuming after step {step}")
            if step >= self.total_steps:
                runner.log(
                    f"the run has all its {self.total_steps} steps, and trains no further; for more steps set a larger "
                    "total_steps or epochs"
                )
            self.step = self._saved_step = step
            self.load_position(position)
        # At step 0 all records are dropped: an evaluation before the first step will be repeated as well.
        runner.rewind(self.step or -1)

    def save(self, *, asynchronous: bool = False) -> None:
        """Save the complete state for a bitwise resume; every rank calls this. `asynchronous` writes in the background.

        If this step is saved already, or an error interrupted its update, it only waits for earlier saves.
        """
        if self._saved_step == self.step or self._mid_update:
            self.engine.wait_for_saves()
            return
        assert self.runner is not None
        self.runner.return_to_folder()
        checkpoints = self.runner.directory.checkpoints
        if not self._tokenizer_saved:
            model = self.engine.config.path
            self.runner.world.main_first(lambda: save_run_tokenizer(checkpoints, self.tokenizer, model))
            self._tokenizer_saved = True
        state = {"engine": self.engine.state_dict(), **self.position()}
        if self.critic is not None:
            state["critic"] = self.critic.state_dict()
            if self.critic.lora:
                state["critic_fingerprint"] = self.critic.fingerprint
        self.engine.saver.save(
            checkpoints,
            self.step,
            state,
            self.config.checkpoint.keep,
            self.engine.fingerprint,
            asynchronous=asynchronous,
        )
        self._saved_step = self.step

    def finish(self) -> None:
        """Save, and export the model, after the last step."""
        self.save()
        self.export()

    def export(self) -> None:
        """Export the model, or its LoRAs in PEFT's format, with the tokenizer of the run."""
        assert self.runner is not None
        self.engine.save(self.runner.directory.export, format=self.engine.export_format, tokenizer=self.tokenizer)


def join_processes(config: Config, model: EngineConfig) -> Config:
    """Join the processes of the model's layout, require that they start the same run, and return its configuration.

    A `run_dir` with the time differs between processes; the result has the main process's.
    """
    device = resolve_device(model.device)
    join_process_group(parse_layout(model.layout).world_size, device.type, model.timeout_s)
    if ControlPlane.world().size == 1:
        return config
    require_same_run(config)
    return type(config).model_validate(ControlPlane.world().broadcast_json(lambda: config.model_dump(mode="json")))


def require_same_rows(rows: Sequence[dict[str, Any]], source: str) -> None:
    """Raise ConfigError on every rank unless all ranks have read the same rows from `source`."""
    ControlPlane.world().require_same(source, f"{len(rows)} rows ({RowLoader(rows, 1).fingerprint()})")


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Set `seconds[name]` to the wall time of the block."""
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude all existing objects from garbage collection inside the block, and collect new ones rarely.

    A rollout creates thousands of short-lived objects per step. Without this, full collections visit all objects of
    transformers and the data (10 % of the time of a small rollout), and frequent collections of new objects cost 1 %.
    If other code has already frozen objects, this does nothing: frozen objects cannot be distinguished.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    thresholds = gc.get_threshold()
    try:
        gc.freeze()
        if 0 < thresholds[0] < GC_THRESHOLD:  # 0: the user collects manually
            gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def run_until_stopped(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result], runner: Runner | None
) -> Result:
    """Return the result of `work`, run on the loop. Raises StoppedError when a signal asks the runner to stop."""
    task = loop.create_task(work)

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    with runner.on_stop_signal(cancel) if runner else nullcontext():
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            if runner is None or not runner.stop_number:
                raise
            raise StoppedError from None


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Turn `sys.exit` in a task of this loop into the task's error.

    Otherwise it would stop the loop and abandon all other tasks. `raise KeyboardInterrupt` in a task is treated alike,
    unless Python's own signal handler is active and the exception may be the user's Ctrl-C.
    """

    def create(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Contained(coroutine), loop=loop, **options)

    loop.set_task_factory(create)


class _Contained(Coroutine[Any, Any, Any]):
    """Coroutine that turns exits into errors. Unlike a wrapping `async def`, it can be canceled before it starts."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self.inner, self.__qualname__ = inner, getattr(inner, "__qualname__", type(inner).__qualname__)

    def send(self, value: Any) -> Any:
        """Continue the coroutine."""
        return self._step(self.inner.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the coroutine."""
        return self._step(self.inner.throw, *error)

    def close(self) -> None:
        """Close the coroutine."""
        self.inner.close()

    def __await__(self) -> Any:
        """Return the iterator of the coroutine."""
        return self.inner.__await__()

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        try:
            return step(*values)
        except (SystemExit, KeyboardInterrupt) as left:
            if isinstance(left, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                raise
            raise ExitError(exit_message(f"the task {self.__qualname__}", left)) from left
