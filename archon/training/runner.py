"""The surroundings of a run: its directory, its records, its progress, and the signals that end it early.

A trainer is given a `Runner` and asks it, after each step, whether it should stop:

    with runner.progress("rl", total=steps, start=step) as progress:
        while step < steps and not runner.stop_requested:
            metrics = ...
            step += 1
            runner.metrics.write(step, metrics)
            progress.update(step, metrics)
    checkpoint.save(...)
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import yaml
from pydantic import BaseModel
from rich.console import Console

import archon
from archon.parallel.world import World
from archon.schema.config import MetricsConfig
from archon.schema.errors import ConfigError
from archon.training.metrics import METRICS_FILE, TRAJECTORIES_FILE, MetricsWriter, TrajectoryWriter
from archon.training.progress import Progress
from archon.training.sinks import SinkRun, Sinks, require_sinks

logger = logging.getLogger(__name__)

PACKAGES_RECORDED = ("torch", "transformers", "safetensors", "numpy", "pydantic", "omegaconf")


class RunDirectory:
    """The folder of one run, held by one process at a time.

    `config.yaml` (resolved), `versions.json`, `metrics.jsonl`, `trajectories.jsonl`, `checkpoints/`, `export/`,
    `stacks/` where a step stalled, what sinks keep there, and `.lock`, which the operating system releases however the
    process ends.
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
        """Create the folder, lock it, and write down the configuration and the versions.

        Raises `ConfigError` when another process holds it, or when it holds a run already and `resume` is false;
        `OSError` when it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
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
                "%s: its file system has no locks (%s); take care that no two runs share the folder",
                self.path,
                error.strerror,
            )
        self._lock = lock
        if not resume and self.holds_a_run():
            self.release()
            raise ConfigError(
                f"run directory {self.path} already holds a run; set resume=true or choose another run_dir"
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        (self.path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        (self.path / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")

    def holds_a_run(self) -> bool:
        """Whether a run has left records or checkpoints here."""
        return (self.metrics.exists() and self.metrics.stat().st_size > 0) or (
            self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        )

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class StoppedError(Exception):
    """SIGINT or SIGTERM interrupted something that need not be waited for."""


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a request the loop honors after its step; the second leaves at once.

    Only the main thread may install handlers; in any other thread nothing is installed and nothing is ever requested.

    Args:
        world: with several processes, one key press reaches each of them twice (from the terminal and from torchrun),
            so what follows within `ECHO_SECONDS` counts as the same, and only the main rank prints.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    ECHO_SECONDS = 2.0

    def __init__(self, world: World | None = None) -> None:
        self.received: signal.Signals | None = None
        self.on_first: Callable[[], None] | None = None  # called by the handler of the first signal
        self._world = world or World()
        self._received_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # os.write, not print: the handler may have interrupted a print, whose buffer cannot be entered twice.
        if self.received is not None:
            if self._world.size > 1 and time.monotonic() - self._received_at < self.ECHO_SECONDS:
                return
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\narchon: leaving at once, unsaved\n")
            os._exit(128 + number)
        self.received, self._received_at = signal.Signals(number), time.monotonic()
        if self.on_first is not None:
            self.on_first()
        if not self._world.is_main:
            return
        message = f"\narchon: {self.received.name}: saving and leaving; once more leaves at once\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, message.encode())


class Runner:
    """One run: `with Runner(run_dir, config, resume=…) as runner:` around everything that trains.

    With several processes all of them enter it, after they have joined; the main one holds the directory, writes and
    prints, and what the others write goes nowhere.

    Attributes: `directory` (`RunDirectory`), `metrics`, `trajectories` (writers) and `console`.

    Args:
        sinks: where the main process sends the metrics besides; ConfigError on entering where that cannot be.
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
        line_seconds: float = 2.0,
    ):
        self.directory = RunDirectory(run_dir)
        self.config = config
        self.resume = resume
        self._metrics_config = sinks or MetricsConfig()
        self._sinks: Sinks | None = None
        self.world = World.now()
        self.console = console or Console(quiet=not self.world.is_main)
        self._line_seconds = line_seconds
        self._signals = StopSignal(self.world)
        self._stopping = 0

    def __enter__(self) -> Self:
        self.world.main_first(self._claim)
        main = self.world.is_main
        try:
            on_record = self._sinks.write if self._sinks else None
            self.metrics = MetricsWriter(self.directory.metrics if main else os.devnull, on_record)
            self.trajectories = TrajectoryWriter(self.directory.trajectories if main else os.devnull, self.log)
        except OSError:
            if self._sinks is not None:
                self._sinks.close(failed=True)
            self.directory.release()
            raise
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.world.most(0)  # no rank leaves while another still waits for what it has sent
        self._signals.__exit__(kind, error, tb)
        self.metrics.close()
        self.trajectories.close()
        if self._sinks is not None:
            self._sinks.close(failed=kind is not None)
        self.directory.release()

    def _claim(self) -> None:
        """On the main process: hold the directory and start the sinks."""
        wanted = self._metrics_config
        require_sinks(wanted.sinks)
        self.directory.acquire(self.config, resume=self.resume)
        run = SinkRun(self.directory.path, wanted.project, self.config.model_dump(mode="json"), self.resume)
        try:
            self._sinks = Sinks(wanted.sinks, run, self.log)
        except ConfigError:
            self.directory.release()
            raise

    @property
    def stop_requested(self) -> bool:
        """Whether SIGINT or SIGTERM asked the run to finish its step, save and leave: of any rank, on every rank, which
        all ask together."""
        self._stopping = self._stopping or self.world.most(self._signals.received or 0)
        return self._stopping > 0

    @contextmanager
    def on_stop_signal(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback`, in a signal handler, when a signal asks to stop within the block, or at once where one has.

        Several processes must end such a block together, and none of them calls it.
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
        """Take the signal of this number as received: a run within this one has answered it already."""
        self._signals.received = signal.Signals(number)

    @property
    def stop_number(self) -> int:
        """The number of the signal that ended the run early, or 0."""
        return self._stopping or self._signals.received or 0

    @property
    def exit_code(self) -> int:
        """0, or 128 + the number of the signal that ended the run early (130, 143)."""
        return 128 + self.stop_number if self.stop_number else 0

    def rewind(self, step: int) -> None:
        """Drop the records later than `step`, the step of the checkpoint a resumed run starts from."""
        self.metrics.truncate(step)
        self.trajectories.truncate(step)

    def progress(self, title: str, total: int, *, start: int = 0, columns: Sequence[str] = ()) -> Progress:
        """Returns a display of a loop of `total` steps; `columns` names the metrics to show, all when empty."""
        return Progress(
            title, total, start=start, columns=columns, console=self.console, line_seconds=self._line_seconds
        )

    def log(self, message: str) -> None:
        """Print a line, above the live table where there is one."""
        self.console.print(message, soft_wrap=True, markup=False, highlight=False)


def versions() -> dict[str, str]:
    """Returns the versions a run depends on: Python, the platform and the packages that compute."""
    found = {"archon": archon.__version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES_RECORDED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
