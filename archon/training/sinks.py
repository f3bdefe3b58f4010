"""Metric sinks: TensorBoard, W&B and Trackio, in addition to `metrics.jsonl`.

Packages are imported only if configured, before training starts. A sink that fails later is dropped with a warning.
`write` takes the time in seconds since the epoch; `close` takes whether an error ended the run.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from archon.schema.errors import ConfigError, describe_error

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class TensorBoard:
    """Event files in `RUN_DIR/tensorboard`."""

    def __init__(self, folder: Path, resume: bool, **run: Any) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def write(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        if self._writer is None:
            # Open at the first write: a resumed run repeats steps, and events from `step` on are purged.
            self._writer = _import("tensorboard").SummaryWriter(str(self._folder), purge_step=step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """End the run."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """W&B run; the run directory stores its id for resuming.

    The step is logged as a metric and used as the x-axis: the built-in step of W&B cannot go back on resume.
    """

    def __init__(self, folder: Path, resume: bool, **run: Any) -> None:
        record = folder / "wandb_id"
        if not (resume and record.is_file()):
            record.write_text(uuid.uuid4().hex[:16])
        self._run = _import("wandb").init(id=record.read_text(), resume="allow", dir=str(folder), **run)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log({"step": step, **numbers})

    def close(self, failed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A Trackio run."""

    def __init__(self, folder: Path, resume: bool, **run: Any) -> None:
        self._run = _import("trackio").init(resume="allow" if resume else "never", **run)

    def write(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        """End the run."""
        self._run.finish()


Sink = TensorBoard | WandB | Trackio
SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def require_sinks(names: Iterable[str]) -> None:
    """Import the packages of the sinks. Raises ConfigError with the install command if one is missing."""
    for name in names:
        _import(name)


def _import(package: str) -> Any:
    try:
        return importlib.import_module(MODULES[package])
    except ImportError as error:
        raise ConfigError(
            f"metrics.sinks: {package} cannot be imported ({error}): pip install 'archon-engine[{package}]'"
        ) from None


class Sinks:
    """Sinks of a run; each gets every record of `metrics.jsonl`.

    Args:
        names: names in `SINKS`.
        folder: the run directory.
        resume: continue the W&B or Trackio run of an earlier process.
        warn: called with one line when a sink fails.
        run: project, name and config of the W&B or Trackio run.

    Raises:
        ConfigError: a sink cannot start.
    """

    def __init__(
        self, names: Iterable[str], folder: Path, resume: bool, warn: Callable[[str], None], **run: Any
    ) -> None:
        self._warn = warn
        self._open: dict[str, Sink] = {}
        for name in dict.fromkeys(names):
            try:
                self._open[name] = SINKS[name](folder, resume, **run)
            except ConfigError:
                raise
            except Exception as error:
                self.close(failed=True)
                raise ConfigError(
                    f"metrics.sinks: {name} cannot be started ({describe_error(error)}); fix it, or leave it out"
                ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a record, including NaN and infinities."""
        numbers = {
            name: float(value)
            for name, value in record.items()
            if name not in {"step", "time"}
            and (isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"))
        }
        for name in list(self._open):
            self._try(name, lambda sink: sink.write(record["step"], record["time"], numbers))

    def close(self, *, failed: bool) -> None:
        """Close all sinks that have not failed."""
        for name in list(self._open):
            self._try(name, lambda sink: sink.close(failed))
        self._open = {}

    def _try(self, name: str, action: Callable[[Sink], None]) -> None:
        try:
            action(self._open[name])
        except Exception as error:  # noqa: BLE001 (a tracker's failure must not end the run)
            del self._open[name]
            self._warn(
                f"warning: metrics no longer go to {name}, which failed ({describe_error(error)}); metrics.jsonl has "
                "them"
            )
