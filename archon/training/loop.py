"""Small parts of a training loop that RL and SFT share."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from archon.checkpoint.native import agree_on_latest, model_fingerprint, open_state
from archon.checkpoint.state_file import read_all
from archon.data import RowLoader
from archon.engine.build import resolve_device
from archon.engine.engine import ArchonEngine
from archon.parallel.layout import parse_layout
from archon.parallel.process_group import join_process_group
from archon.parallel.world import World
from archon.schema.config import EngineConfig, StrictModel
from archon.schema.errors import CheckpointError
from archon.training.runner import Runner, StoppedError

Config = TypeVar("Config", bound=StrictModel)
Result = TypeVar("Result")


def join(config: Config, model: EngineConfig) -> Config:
    """Join the processes that the model's layout needs; gives back the main one's configuration, for what a file says
    (the time, an environment variable) may differ between them."""
    device = resolve_device(model.device)
    join_process_group(parse_layout(model.layout).dims(device.type).world_size, device.type, model.timeout_s)
    if World.now().size == 1:
        return config
    return type(config).model_validate(World.now().tell(lambda: config.model_dump(mode="json")))


@contextmanager
def saved_at_the_end(save: Callable[[], None]) -> Iterator[None]:
    """Call `save` after the block, also when an error or Ctrl-C ends it; with several processes not after an error,
    when the others have no part in it."""
    try:
        yield
    except BaseException:
        if World.now().size == 1:
            save()
        raise
    save()


def require_same_rows(rows: Sequence[dict[str, Any]], source: str) -> None:
    """ConfigError, on every rank, unless all have read the same rows from `source`."""
    World.now().require_same(source, f"{len(rows)} rows ({RowLoader(rows, 1).fingerprint()})")


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
    """What `evaluate` measures, and `seconds/evaluate`; {} where there is nothing to measure."""
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

    with runner.cut_short(cancel) if runner else nullcontext():
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            if runner is None or not runner.stop_number:
                raise
            raise StoppedError from None


def load_newest(
    runner: Runner, engine: ArchonEngine, critic: ArchonEngine | None = None
) -> tuple[int, dict[str, Any]] | None:
    """(step, state) of the run's newest checkpoint, its engines' parts loaded; None where nothing has been saved.

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
