"""Servers as jobs of Slurm, by scripts that this module writes to the shared folder of pushes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from archon.remote import supervisor
from archon.remote.http import KEY
from archon.remote.launchers.base import Command, ServerHandle, log_tail
from archon.schema.errors import ConfigError

COMMAND_SECONDS = 60.0
HEARTBEAT_SECONDS = 120.0
"""A job ends itself when the trainer has not touched its heartbeat for so long."""
HEARTBEAT_INTERVAL = 10.0
QUEUE_SECONDS = 10.0
_PORTS = "20000 + SLURM_JOB_ID % 20000"


def script(name: str, command: Command, folder: Path, options: Sequence[str], python: str = sys.executable) -> str:
    """Return the script of a server's job, which writes its URL to `folder`/NAME.url and ends with the trainer.

    Args:
        folder: that trainer and nodes share.
        options: of sbatch.
        python: on the nodes.
    """
    own = {"job-name": f"archon-{name}", "output": f"{folder / name}.log", "open-mode": "append"}
    headers = [f"#SBATCH --{key}={value}" for key, value in own.items()] + [f"#SBATCH {option}" for option in options]
    # A token is no argument, which every user of the node could read; the job inherits it from sbatch's environment.
    secret = {"ARCHON_TOKEN", KEY}
    exports = [f"export {key}={shlex.quote(value)}" for key, value in command.environment.items() if key not in secret]
    heartbeat = f"--heartbeat {shlex.quote(str(folder / 'heartbeat'))} {HEARTBEAT_SECONDS:g}"
    started = shlex.quote(str(folder / f"{name}.url"))
    return "\n".join(
        [
            "#!/bin/bash",
            *headers,
            "set -eu",
            *exports,
            f"PORT=$(( {_PORTS} ))",
            "HOST=$(hostname)",
            f'echo "http://$HOST:$PORT" > {started}.new',
            f"mv {started}.new {started}",
            f"exec {shlex.quote(python)} {shlex.quote(supervisor.__file__)} {heartbeat} -- \\",
            f"    {command.shell('0.0.0.0', '$PORT')}",
            "",
        ]
    )


class SlurmHandle(ServerHandle):
    """A job of Slurm. A job that is started again may be on another node, with another URL."""

    def __init__(self, name: str, command: Command, folder: Path, options: Sequence[str], seconds: float) -> None:
        super().__init__(name)
        self._command, self._folder, self._options, self._seconds = command, folder, list(options), seconds
        self._job: str | None = None
        self._asked = 0.0
        self._state = ""
        self._stop_event = threading.Event()

    def _start(self) -> None:
        path, url = self._folder / f"{self.name}.sh", self._folder / f"{self.name}.url"
        url.unlink(missing_ok=True)
        self._stop_event = threading.Event()
        self._touch_heartbeat()
        threading.Thread(
            target=self._heartbeat_loop, args=[self._stop_event], name=f"archon-{self.name}", daemon=True
        ).start()
        path.write_text(script(self.name, self._command, self._folder, self._options))
        job = _run(["sbatch", "--parsable", str(path)], self._command.environment)
        self._job, self._asked = job.strip().partition(";")[0], time.monotonic()
        self._state = "PENDING"
        until = time.monotonic() + self._seconds
        while not url.exists():
            if (end := self.exit_message()) is not None or time.monotonic() > until:
                raise ConfigError(end or f"job {self._job} ({self.name}) did not begin within {self._seconds:g} s")
            if self._stop_event.wait(0.2):
                raise ConfigError(f"{self.name} was ended before its job began")
        self.url = url.read_text().strip()

    def _touch_heartbeat(self) -> None:
        (self._folder / "heartbeat").touch()

    def _heartbeat_loop(self, over: threading.Event) -> None:
        """Touches the heartbeat also while nobody watches: before the first push, and during long ones."""
        while not over.wait(HEARTBEAT_INTERVAL):
            try:
                self._touch_heartbeat()
            except OSError:  # of a shared folder that cannot be reached for a moment
                continue

    def exit_message(self) -> str | None:
        if self._job is None:
            return None
        if time.monotonic() - self._asked > QUEUE_SECONDS:
            self._asked = time.monotonic()
            self._state = _run(
                ["squeue", "--noheader", "--format=%T", f"--jobs={self._job}"], {}, allow_failure=True
            ).strip()
        if self._state:
            return None
        log = self._folder / f"{self.name}.log"
        return f"job {self._job} ({self.name}) is no longer in Slurm's queue; the end of {log}:\n{log_tail(log)}"

    def stop(self) -> None:
        self._stop_event.set()
        if self._job is not None:
            _run(["scancel", self._job], {}, allow_failure=True)
            self._job = None


def _run(command: list[str], environment: dict[str, str], *, allow_failure: bool = False) -> str:
    """Return what a command of Slurm's prints; where it `allow_failure`, nothing."""
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError(f"rollout.launch.launcher is slurm, and there is no {command[0]} on PATH") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not answer within {COMMAND_SECONDS:g} s") from None
    if done.returncode and not allow_failure:
        raise ConfigError(f"{shlex.join(command)} ended with status {done.returncode}: {done.stderr.strip()[:500]}")
    return "" if done.returncode else done.stdout
