"""Environment of a run: directory, records, progress display and stop signals."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import yaml
from pydantic import BaseModel
from rich.console import Console

from archon.checkpoint.atomic import named_errors, write_text
from archon.checkpoint.native import latest_checkpoint
from archon.engine.agreement import PACKAGES, input_paths, package_versions
from archon.parallel.control_plane import ControlPlane
from archon.parallel.failure import describe_run, is_failing
from archon.schema.config import MetricsConfig, require_separate
from archon.schema.errors import CheckpointError, ConfigError
from archon.training.metrics import METRICS_FILE, TRAJECTORIES_FILE, MetricsWriter, TrajectoryWriter
from archon.training.progress import Progress, open_display
from archon.training.sinks import Sinks, require_sinks

logger = logging.getLogger(__name__)

PACKAGES_RECORDED = (*PACKAGES, "pydantic", "omegaconf")


class RunDirectory:
    """Folder of one run, locked by one process at a time.

    It contains `config.yaml` (resolved), `versions.json`, `metrics.jsonl`, `trajectories.jsonl`, `checkpoints/`,
    `export/`, `data/` of rows passed in Python, `stacks/` after a stall, `failure.txt` after the loss of a rank, files
    of sinks, and `.lock`, which the operating system releases when the process ends.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics = self.path / METRICS_FILE
        self.trajectories = self.path / TRAJECTORIES_FILE
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.stacks = self.path / "stacks"
        self._lock: int | None = None

    def acquire(self, config: BaseModel, *, resume: bool) -> None:
        """Create and lock the folder, and write `config.yaml` and `versions.json`.

        Raises:
            ConfigError: the folder cannot be written, another process has locked it, or it contains a run and `resume`
                is false.
        """
        self.require_usable()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"run_dir {self.path}: {error.strerror}; choose another run_dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode() or "unknown"
            os.close(lock)
            raise ConfigError(
                f"run directory {self.path} is in use by process {holder}; wait for it to end or choose another run_dir"
            ) from None
        except OSError as error:
            logger.warning(
                "%s: the file system does not support locks (%s); do not use this folder for two runs",
                self.path,
                error.strerror,
            )
        self._lock = lock
        if not resume and self.has_run():
            self.release()
            raise ConfigError(
                f"run directory {self.path} already holds a run; set resume=true or choose another run_dir"
            )
        with named_errors(self.path / ".lock"):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        write_text(self.path / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        write_text(self.path / "versions.json", json.dumps(versions(), indent=2) + "\n")

    def require_usable(self) -> None:
        """Raise ConfigError if the folder is the root of the file system, or cannot be written. Creates nothing."""
        path = self.path.absolute()
        target = Path(os.path.realpath(path))
        if target == target.parent:  # also //
            raise ConfigError(f"run_dir {self.path} is the root of the file system; choose another run_dir")
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if not existing.is_dir():
            raise ConfigError(f"run_dir {self.path}: {existing} is not a folder; choose another run_dir")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"run_dir {self.path}: {existing} cannot be written; choose another run_dir")

    def resume_advice(self) -> str:
        """Return one line on how to continue the run after its processes have ended."""
        try:
            latest = latest_checkpoint(self.checkpoints)
        except CheckpointError as error:
            return str(error)
        if latest is None:
            return "no checkpoint was saved; start the same command with resume=true to begin again"
        return f"to continue after {latest.name}, start the same command with resume=true"

    def has_run(self) -> bool:
        """Return whether the folder contains records or checkpoints of a run."""
        return (self.metrics.exists() and self.metrics.stat().st_size > 0) or (
            self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        )

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class StoppedError(Exception):
    """SIGINT or SIGTERM stopped a rollout or an evaluation; raised on all processes together."""


class StopSignal:
    """Signal handler: the first SIGINT or SIGTERM requests a stop after the step, the second ends the process.

    Python allows handlers only in the main thread; in other threads signals are not handled.

    Args:
        world: with several processes, Ctrl-C reaches each of them twice (from the terminal and from torchrun), so a
            second signal within `ECHO_SECONDS` is ignored, and only the main rank prints.
    """

    ECHO_SECONDS = 2.0

    def __init__(self, world: ControlPlane) -> None:
        self.received: signal.Signals | None = None
        self.on_first: Callable[[], None] | None = None  # called by the handler of the first signal
        self._world = world
        self._received_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if self._world.size > 1 and time.monotonic() - self._received_at < self.ECHO_SECONDS:
                return
            _write_to_stderr("exiting now without saving")
            os._exit(128 + number)
        self.received, self._received_at = signal.Signals(number), time.monotonic()
        if self.on_first is not None:
            self.on_first()
        if self._world.is_main and not is_failing():
            _write_to_stderr(f"{self.received.name}: saving, then exiting; press Ctrl-C again to exit now")


def _write_to_stderr(message: str) -> None:
    """Print a line from a signal handler with `os.write`: `print` is not reentrant."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\narchon: {message}\n".encode())


class Runner:
    """Context manager of one run: `with Runner(run_dir, config, resume=…) as runner:`.

    All processes enter it together. The main process locks the directory, writes records, prints, and sends metrics to
    `sinks`; the others write to /dev/null. Entering raises ConfigError if a sink cannot start.
    """

    metrics: MetricsWriter
    trajectories: TrajectoryWriter

    def __init__(
        self,
        run_dir: str | Path,
        config: BaseModel,
        *,
        resume: bool = False,
        sinks: MetricsConfig | None = None,
        console: Console | None = None,
    ):
        self.directory = RunDirectory(run_dir)
        self.config = config
        self.resume = resume
        self._metrics_config = sinks or MetricsConfig()
        self._sinks: Sinks | None = None
        self.world = ControlPlane.world()
        self.console = console or Console(quiet=not self.world.is_main, file=open_display())
        self._folder = current_folder()
        self._signals = StopSignal(self.world)
        self._stopping = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.world.main_first(lambda: self._claim(stack))
            main = self.world.is_main
            on_record = self._sinks.write if self._sinks else None
            self.metrics = MetricsWriter(self.directory.metrics if main else os.devnull, on_record)
            stack.callback(self.metrics.close)
            self.trajectories = TrajectoryWriter(self.directory.trajectories if main else os.devnull, self.log)
            stack.callback(self.trajectories.close)
            stack.enter_context(self._signals)
            self._exit_stack = stack.pop_all()
        describe_run(self.directory.path, self.directory.resume_advice)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.world.barrier()  # a rank must not exit while another rank still receives from it
            describe_run(None)
        self._exit_stack.__exit__(kind, error, tb)

    def _claim(self, stack: ExitStack) -> None:
        """Lock the directory and start the sinks until `stack` closes; on the main process."""
        metrics = self._metrics_config
        require_separate_run(self.directory.path, self.config)
        require_sinks(metrics.sinks)
        self.directory.acquire(self.config, resume=self.resume)
        stack.callback(self.directory.release)
        path, config = self.directory.path, self.config.model_dump(mode="json")
        run = {"project": metrics.project, "name": path.resolve().name, "config": config}
        self._sinks = sinks = Sinks(metrics.sinks, path, self.resume, self.log, **run)
        stack.push(lambda kind, *_: sinks.close(failed=kind is not None))

    @property
    def stop_requested(self) -> bool:
        """Whether any rank received SIGINT or SIGTERM. A collective."""
        self._stopping = self._stopping or self.world.all_reduce_max(self._signals.received or 0)
        return self._stopping > 0

    @contextmanager
    def on_stop_signal(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` in the signal handler when a stop signal arrives inside the block, or now if it has arrived.

        With several processes it is never called: they must leave the block together.
        """
        if self.world.size == 1:
            self._signals.on_first = callback
            if self._signals.received is not None:
                callback()
        try:
            yield
        finally:
            self._signals.on_first = None

    def request_stop(self, number: int) -> None:
        """Act as if the signal was received, for a nested run or another process that received it."""
        self._signals.received = signal.Signals(number)

    @property
    def stop_number(self) -> int:
        """Number of the signal that stopped the run, or 0."""
        return self._stopping or self._signals.received or 0

    @property
    def exit_code(self) -> int:
        """0, or 128 + the number of the signal that stopped the run (130, 143)."""
        return 128 + self.stop_number if self.stop_number else 0

    def rewind(self, step: int) -> None:
        """Remove the records after `step`, the step of the checkpoint that the run resumes from."""
        self.metrics.truncate(step)
        self.trajectories.truncate(step)

    def progress(self, title: str, total: int, *, start: int = 0, columns: Sequence[str] = ()) -> Progress:
        """Create a display of `total` steps; `columns` names the metrics to show, by default all."""
        return Progress(title, total, start=start, columns=columns, console=self.console)

    def return_to_folder(self) -> None:
        """Return to the folder that the run was started in, which a reward or workflow may have left.

        Relative paths of the configuration, such as `run_dir`, mean this folder.
        """
        folder = current_folder()
        if folder != self._folder and self._folder is not None:
            where = folder or "one that was removed"
            self.log(f"the working directory changed during the run to {where}; returning to {self._folder}")
            os.chdir(self._folder)

    def log(self, message: str) -> None:
        """Print a line, above the live table if there is one."""
        self.console.print(message, soft_wrap=True, markup=False, highlight=False)


def current_folder() -> str | None:
    """Return the working directory; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def require_separate_run(run_dir: Path, config: BaseModel) -> None:
    """Raise ConfigError if a run would write into a checkpoint, tokenizer or LoRA that its configuration names."""
    models = [path for path, split in input_paths(config.model_dump(mode="json")) if split is None]
    require_separate(run_dir, models, may_contain=True)
    for part in ("checkpoints", "export"):
        require_separate(run_dir / part, models)


def versions() -> dict[str, str]:
    """Return the versions of archon, Python, the platform and `PACKAGES_RECORDED`."""
    return package_versions(PACKAGES_RECORDED) | {"platform": platform.platform()}
