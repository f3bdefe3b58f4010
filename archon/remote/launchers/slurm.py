"""Servers as Slurm jobs; their scripts are written to the shared folder of pushes."""

from __future__ import annotations

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
from archon.schema.children import child_environment
from archon.schema.errors import ConfigError

COMMAND_SECONDS = 60.0
HEARTBEAT_SECONDS = 120.0
"""A job stops if the trainer has not touched the heartbeat file for this long."""
HEARTBEAT_INTERVAL = 10.0
QUEUE_SECONDS = 10.0
_PORTS = "20000 + SLURM_JOB_ID % 20000"


def script(name: str, command: Command, folder: Path, options: Sequence[str], python: str = sys.executable) -> str:
    """Return the job script of a server that writes its URL to `folder`/NAME.url and ends with the trainer.

    Args:
        name: name of the server.
        command: command of the server.
        folder: folder that trainer and nodes share.
        options: options of sbatch.
        python: path of Python on the nodes.
    """
    defaults = [f"--job-name=archon-{name}", f"--output={folder / name}.log", "--open-mode=append"]
    headers = [f"#SBATCH {option}" for option in (*defaults, *options)]
    # The job inherits the token from sbatch's environment: every user of the node could read an argument.
    secret = {"ARCHON_TOKEN", KEY}
    exports = [f"export {key}={shlex.quote(value)}" for key, value in command.environment.items() if key not in secret]
    heartbeat = f"--heartbeat {shlex.quote(str(folder / 'heartbeat'))} {HEARTBEAT_SECONDS:g}"
    url = shlex.quote(str(folder / f"{name}.url"))
    return "\n".join(
        [
            "#!/bin/bash",
            *headers,
            "set -eu",
            *exports,
            f"PORT=$(( {_PORTS} ))",
            "HOST=$(hostname)",
            f'echo "http://$HOST:$PORT" > {url}.new',
            f"mv {url}.new {url}",
            f"exec {shlex.quote(python)} {shlex.quote(supervisor.__file__)} {heartbeat} -- \\",
            f"    {command.shell('0.0.0.0', '$PORT')}",
            "",
        ]
    )


class SlurmHandle(ServerHandle):
    """A Slurm job. A restart may move it to another node and URL."""

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
                raise ConfigError(f"{self.name} was stopped before its job began")
        self.url = url.read_text().strip()

    def _touch_heartbeat(self) -> None:
        (self._folder / "heartbeat").touch()

    def _heartbeat_loop(self, over: threading.Event) -> None:
        """Touch the heartbeat also when no watcher runs: before the first push and during long pushes."""
        while not over.wait(HEARTBEAT_INTERVAL):
            try:
                self._touch_heartbeat()
            except OSError:  # the shared folder is temporarily unavailable
                continue

    def exit_message(self) -> str | None:
        """Return that the job left the queue; None while it runs or waits."""
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
        """Cancel the job."""
        self._stop_event.set()
        if self._job is not None:
            _run(["scancel", self._job], {}, allow_failure=True)
            self._job = None


def _run(command: list[str], environment: dict[str, str], *, allow_failure: bool = False) -> str:
    """Return the output of a Slurm command; empty if it fails and `allow_failure` is set."""
    try:
        done = subprocess.run(
            command, env=child_environment() | environment, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError(f"rollout.launch.launcher is slurm, but {command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not answer within {COMMAND_SECONDS:g} s") from None
    if done.returncode and not allow_failure:
        raise ConfigError(f"{shlex.join(command)} ended with status {done.returncode}: {done.stderr.strip()[:500]}")
    return "" if done.returncode else done.stdout
