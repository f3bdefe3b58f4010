"""The run loop that all trainers share: open, resume, step, evaluate, record, save, export."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from archon.checkpoint.native import agree_on_latest, model_fingerprint, open_state
from archon.checkpoint.state_file import read_all
from archon.data import RowLoader
from archon.engine.build import resolve_device
from archon.engine.engine import ArchonEngine
from archon.parallel.control_plane import ControlPlane
from archon.parallel.layout import parse_layout
from archon.parallel.process_group import join_process_group
from archon.schema.config import EngineConfig, StrictModel
from archon.schema.errors import CheckpointError
from archon.training.runner import Runner, StoppedError

Config = TypeVar("Config", bound=StrictModel)
Result = TypeVar("Result")


class BaseTrainer:
    """One training run. `run` is the whole of it; a subclass defines a step, what is evaluated and what is saved.

    What a subclass opens sets `engine`, `total_steps`, `eval_every` (steps between evaluations; 0: only after the last)
    and, where there is one, `critic`. `config` has `run_dir`, `resume`, `metrics` and `checkpoint`.
    """

    title: str
    columns: tuple[str, ...]
    config: Any
    engine: ArchonEngine
    critic: ArchonEngine | None = None
    total_steps = 0
    eval_every = 0

    def __init__(self, config: StrictModel, runner: Runner | None = None) -> None:
        self.config = config
        self.runner = runner
        self.step = 0
        self._saved_step: int | None = None
        self._mid_update = False  # while True the weights belong to no step

    def run(self, model: EngineConfig, opened: AbstractContextManager[Any]) -> dict[str, float]:
        """Run to the last step, or until a signal asks to stop; returns the newest metrics.

        Args:
            model: the trained model's configuration, whose layout fixes how many processes take part.
            opened: holds open what the steps need; it is entered when the run directory is this run's.
        """
        metrics: dict[str, float] = {}
        with ExitStack() as stack:
            if self.runner is None:
                self.config = config = join(self.config, model)
                made = Runner(config.run_dir, config, resume=config.resume, sinks=config.metrics)
                self.runner = stack.enter_context(made)
            runner = self.runner
            stack.enter_context(suppress(StoppedError))
            stack.enter_context(opened)
            stack.enter_context(saved_at_the_end(self.save))
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
                            metrics |= timed_evaluation(self.evaluate)
                    finally:
                        runner.metrics.write(self.step, metrics)
                    progress.update(self.step, metrics)
                    if due(self.step, self.config.checkpoint.every):
                        self.save(asynchronous=True)
            if self.finished:
                self.finish()
        return metrics

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.total_steps

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation belongs to the step just done."""
        return self.finished or due(self.step, self.eval_every)

    def train_step(self) -> dict[str, float]:
        """One step; returns its metrics. Sets `_mid_update` before it first changes a weight."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Returns the held-out metrics; {} where there is nothing to measure."""
        raise NotImplementedError

    def before_first_step(self) -> dict[str, float]:
        """Returns the record of the step that the run begins at, where it has one to write."""
        return {}

    def after_step(self) -> dict[str, float]:
        """Called after each step, before its evaluation; returns further metrics of it."""
        return {}

    def position(self) -> dict[str, Any]:
        """Returns what a checkpoint holds besides the engines: where the data stream stands."""
        raise NotImplementedError

    def load_position(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which `position` returned."""
        raise NotImplementedError

    def resume(self) -> None:
        """Go on from the newest checkpoint where the configuration asks for it and there is one."""
        if not self.config.resume or self.runner is None:
            return
        found = load_newest(self.runner, self.engine, self.critic)
        if found is not None:
            self.step, state = found
            self._saved_step = self.step
            self.load_position(state)
        # At step 0 all records go: an evaluation before the first step is about to be repeated as well.
        self.runner.rewind(self.step or -1)

    def save(self, *, asynchronous: bool = False) -> None:
        """Checkpoint everything a bitwise resume needs; `asynchronous` writes it during the next steps.

        Nothing is written, but what is being written waited for, when this step's checkpoint is there already, or when
        an error struck inside an update, which leaves weights that belong to no step.
        """
        assert self.runner is not None
        if self._saved_step == self.step or self._mid_update:
            self.engine.wait_for_saves()
            return
        keep = self.config.checkpoint.keep
        state = self.position()
        save_newest(self.runner, self.engine, self.step, state, keep, critic=self.critic, asynchronous=asynchronous)
        self._saved_step = self.step

    def finish(self) -> None:
        """Save, and export the model, after the last step."""
        assert self.runner is not None
        self.save()
        self.engine.save(self.runner.directory.export)


def join(config: Config, model: EngineConfig) -> Config:
    """Join the processes that the model's layout needs, and return the main one's configuration: what a file says (the
    time, an environment variable) may differ between them."""
    device = resolve_device(model.device)
    join_process_group(parse_layout(model.layout).world_size, device.type, model.timeout_s)
    if ControlPlane.of_run().size == 1:
        return config
    return type(config).model_validate(ControlPlane.of_run().broadcast_json(lambda: config.model_dump(mode="json")))


@contextmanager
def saved_at_the_end(save: Callable[[], None]) -> Iterator[None]:
    """Call `save` after the block, also when an error or Ctrl-C ends it; with several processes not after an error,
    when the others have no part in it."""
    try:
        yield
    except BaseException:
        if ControlPlane.of_run().size == 1:
            save()
        raise
    save()


def require_same_rows(rows: Sequence[dict[str, Any]], source: str) -> None:
    """ConfigError, on every rank, unless all have read the same rows from `source`."""
    ControlPlane.of_run().require_same(source, f"{len(rows)} rows ({RowLoader(rows, 1).fingerprint()})")


def due(step: int, every: int) -> bool:
    """Whether something done every `every` steps is due after `step`; never for 0."""
    return every > 0 and step % every == 0


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Put the wall time of the block into `seconds[name]`."""
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def timed_evaluation(evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Returns what `evaluate` measures, and `seconds/evaluate`; {} where there is nothing to measure."""
    seconds: dict[str, float] = {}
    with timed(seconds, "evaluate"):
        measured = evaluate()
    return measured | {"seconds/evaluate": seconds["evaluate"]} if measured else {}


@contextmanager
def long_lived_objects_frozen() -> Iterator[None]:
    """Keep what exists now out of garbage collection inside the block.

    A rollout makes thousands of short-lived objects a step. Each full collection they cause would walk over everything
    that transformers and the data have loaded, which was a tenth of a small rollout's time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_until_stopped(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result], runner: Runner | None
) -> Result:
    """Run `work` on the loop to its end, or raise `StoppedError` when a signal asks the runner to stop."""
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


def load_newest(
    runner: Runner, engine: ArchonEngine, critic: ArchonEngine | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Load the engines from the run's newest checkpoint, and return (step, state); None where nothing has been saved.

    Every rank calls it; the checkpoint may be of another layout.
    """
    folder = agree_on_latest(runner.directory.checkpoints)
    if folder is None:
        runner.log(f"resume=true, and {runner.directory.path} holds no checkpoint: the run begins at step 0")
        return None
    with open_state(folder, model_fingerprint(engine.args)) as (step, state):
        engine.load_state_dict(state.pop("engine"))
        if critic is not None:
            if "critic" not in state:
                raise CheckpointError(f"{folder}: the checkpoint has no critic; was algorithm.advantage changed?")
            critic.load_state_dict(state.pop("critic"))
        runner.log(f"resuming after step {step}")
        return step, read_all(state)


def save_newest(
    runner: Runner,
    engine: ArchonEngine,
    step: int,
    state: dict[str, Any],
    keep: int,
    *,
    critic: ArchonEngine | None = None,
    asynchronous: bool = False,
) -> None:
    """Save the engines and `state` as the checkpoint of `step`, for `load_newest`; every rank calls it."""
    fingerprint = model_fingerprint(engine.args)
    everything = {"engine": engine.state_dict(), **state}
    if critic is not None:
        everything["critic"] = critic.state_dict()
    engine.saver.save(runner.directory.checkpoints, step, everything, keep, fingerprint, asynchronous=asynchronous)
