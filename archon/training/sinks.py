"""Sends metrics, as `metrics.jsonl` has them, to TensorBoard, W&B or Trackio too.

A package is imported only where a run asks for it, before anything is trained. A sink that fails later costs one
warning and is left out from then on: the file has everything.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from archon.schema.errors import ConfigError

NOT_NUMBERS = frozenset({"step", "time"})


@dataclass(frozen=True)
class SinkRun:
    """A run, as a sink sees it; with `resume` it goes on where another process stopped."""

    folder: Path
    project: str
    config: dict[str, Any]
    resume: bool

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Sink(Protocol):
    """Where numbers go. Whatever it raises ends it, and not the run."""

    def write(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Take the numbers of `step`; `time` in seconds since the epoch."""

    def close(self, failed: bool) -> None:
        """Send what is left; `failed`: an error ended the run."""


class TensorBoard:
    """Event files in `RUN_DIR/tensorboard`."""

    module, package = "torch.utils.tensorboard", "tensorboard"

    def __init__(self, run: SinkRun) -> None:
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None

    def write(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            # Opened here, where it is known which steps a resumed run repeats: from this one on what was there is void.
            self._writer = _imported(type(self)).SummaryWriter(str(self._folder), purge_step=step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A W&B run named after the run directory, which keeps its id for a resumed run.

    W&B's own step never goes back, and a resumed run repeats steps: ours is a number of its own, the axis of all.
    """

    module, package = "wandb", "wandb"

    def __init__(self, run: SinkRun) -> None:
        record = run.folder / "wandb_id"
        if not (run.resume and record.is_file()):
            record.write_text(uuid.uuid4().hex[:16])
        self._run = _imported(type(self)).init(
            project=run.project,
            name=run.name,
            id=record.read_text(),
            resume="allow",
            dir=str(run.folder),
            config=run.config,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A Trackio run named after the run directory."""

    module, package = "trackio", "trackio"

    def __init__(self, run: SinkRun) -> None:
        resume = "allow" if run.resume else "never"
        self._run = _imported(type(self)).init(project=run.project, name=run.name, config=run.config, resume=resume)

    def write(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


SINKS: dict[str, type[TensorBoard | WandB | Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def require_sinks(names: Iterable[str]) -> None:
    """Import what the sinks need; ConfigError naming what to install where it is missing."""
    for name in names:
        _imported(SINKS[name])


def _imported(sink: type[TensorBoard | WandB | Trackio]) -> Any:
    try:
        return importlib.import_module(sink.module)
    except ImportError as error:
        raise ConfigError(
            f"metrics.sinks: {sink.package} cannot be imported ({error}): pip install 'archon-engine[{sink.package}]'"
        ) from None


class Sinks:
    """The sinks of a run, which are given each record of `metrics.jsonl`.

    Args:
        names: of `SINKS`.
        run: which run it is.
        warn: called with one line for a sink that failed.

    Raises `ConfigError` where one cannot be started.
    """

    def __init__(self, names: Iterable[str], run: SinkRun, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._open: dict[str, Sink] = {}
        for name in dict.fromkeys(names):
            try:
                self._open[name] = SINKS[name](run)
            except ConfigError:
                raise
            except Exception as error:
                self.close(failed=True)
                raise ConfigError(
                    f"metrics.sinks: {name} cannot be started ({_one_line(error)}); fix it, or leave it out"
                ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a record as `metrics.jsonl` has it, NaN and infinities as such."""
        numbers = {
            name: float(value)
            for name, value in record.items()
            if name not in NOT_NUMBERS and (isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"))
        }
        for name in list(self._open):
            self._try(name, lambda sink: sink.write(record["step"], record["time"], numbers))

    def close(self, *, failed: bool) -> None:
        """Close what is still open."""
        for name in list(self._open):
            self._try(name, lambda sink: sink.close(failed))
        self._open = {}

    def _try(self, name: str, action: Callable[[Sink], None]) -> None:
        try:
            action(self._open[name])
        except Exception as error:  # noqa: BLE001 (a record kept elsewhere is not worth a run)
            del self._open[name]
            self._warn(
                f"warning: metrics no longer go to {name}, which failed ({_one_line(error)}); metrics.jsonl has them"
            )


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
