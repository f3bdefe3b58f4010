"""Commands and handles of launched servers; the local handle runs a process on this machine."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import archon
from archon.remote.config import LaunchConfig
from archon.remote.http import KEY
from archon.schema.children import start_child
from archon.schema.errors import ConfigError
from archon.schema.keeper import GRACE_SECONDS
from archon.schema.listening import listening

LOG_BYTES = 4000
END_SECONDS = 30.0


@dataclass(frozen=True)
class Command:
    """Command of a server.

    Attributes:
        arguments: program and arguments with placeholders `{host}` and `{port}`.
        environment: additional environment variables.
    """

    arguments: list[str]
    environment: dict[str, str]

    def argv(self, host: str, port: str) -> list[str]:
        """Return the arguments of a server that listens on `host` and `port`."""
        return [argument.replace("{host}", host).replace("{port}", port) for argument in self.arguments]

    def shell(self, host: str, port: str) -> str:
        """Return a shell command; `host` and `port` may be shell variables such as `$PORT`."""
        quoted = " ".join(map(shlex.quote, self.arguments))
        return quoted.replace("'{host}'", host).replace("'{port}'", port)


def command(config: LaunchConfig, model: str, push_root: Path, dtype: str, lora_rank: int | None) -> Command:
    """Return the command of a server that accepts weight pushes.

    Args:
        config: engine, program and additional arguments.
        model: checkpoint that the server loads first.
        push_root: parent folder of all pushes.
        dtype: compute dtype.
        lora_rank: rank of the pushed LoRA; None: whole weights are pushed.
    """
    token = {"ARCHON_TOKEN": os.environ[KEY]}
    package = str(Path(archon.__file__).resolve().parents[1])
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    address = ["--host", "{host}", "--port", "{port}"]
    if config.engine == "archon":
        program = config.command or [sys.executable, "-m", "archon", "serve"]
        options = [model, *address, "--push-root", str(push_root), f"dtype={dtype}"]
        return Command([*program, *options, *config.args], token | path)
    if config.engine == "sglang":
        program = config.command or [sys.executable, "-m", "sglang.launch_server"]
        return Command([*program, "--model-path", model, *address, "--dtype", dtype, *config.args], {})
    program = config.command or ["vllm", "serve"]
    options = [model, *address, "--dtype", dtype, "--enable-scale-out"]
    if config.gpu_share is not None:
        options += ["--enable-sleep-mode", "--gpu-memory-utilization", str(config.gpu_share)]
    environment = {"VLLM_SERVER_DEV_MODE": "1"} | path
    if lora_rank is None:
        extension = "archon.serve.vllm_extension.Extension"
        options += ["--worker-extension-cls", extension, "--weight-transfer-config", '{"backend": "archon"}']
    else:
        options += ["--enable-lora", "--max-lora-rank", str(max(8, lora_rank))]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return Command([*program, *options, *config.args], environment)


def ensure_server_key() -> str:
    """Return the API key of this run's servers; create one if it is not set."""
    return os.environ.setdefault(KEY, secrets.token_hex(16))


class ServerHandle(ABC):
    """A server that the run can restart.

    Attributes:
        name: name in logs.
        url: URL of the server; empty before the first start.
        started: time of the last start, by the monotonic clock.
        failed_starts: starts since the last successful push.
    """

    def __init__(self, name: str) -> None:
        self.name, self.url = name, ""
        self.started, self.failed_starts = 0.0, 0

    def start(self) -> None:
        """Start or restart the server."""
        self.stop()
        self.started = time.monotonic()
        self.failed_starts += 1
        self._start()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def exit_message(self) -> str | None:
        """Return how the server ended, with the end of its log; None while it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server and its child processes, if it runs."""


class LocalHandle(ServerHandle):
    """A server process on this machine. It and its child processes end with this process, also after a kill.

    Args:
        name: name in logs.
        command: command of the server.
        folder: folder of its log.
        host: local address on which it listens.
    """

    def __init__(self, name: str, command: Command, folder: Path, host: str = "127.0.0.1") -> None:
        super().__init__(name)
        self.command, self.folder, self.host = command, folder, host
        self._log = folder / f"{name}.log"
        self._server: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        port = str(_free_port(self.host, int(self.url.rpartition(":")[2] or 0)))
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"
        with self._log.open("ab") as log:
            try:
                self._server = start_child(
                    self.command.argv(self.host, port),
                    self.command.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # only the trainer handles Ctrl-C
                )
            except OSError as error:
                raise ConfigError(f"cannot start {self.name} ({self.command.arguments[0]}): {error}") from None

    def exit_message(self) -> str | None:
        """Return how the process ended; None while it runs."""
        if self._server is None or (code := self._server.poll()) is None:
            return None
        status = code if code >= 0 else 128 - code
        return f"{self.name} ended with status {status}; the end of {self._log}:\n{log_tail(self._log)}"

    def stop(self) -> None:
        """Stop the server's process group by SIGTERM, then by SIGKILL."""
        server, self._server = self._server, None
        if server is None or server.poll() is not None:
            return  # the keeper of `archon.schema.children` has killed its children
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, END_SECONDS)):
            with suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with suppress(subprocess.TimeoutExpired):
                server.wait(seconds)


def log_tail(path: Path) -> str:
    """Return the last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode("utf-8", "replace").strip()
    except OSError as error:
        return f"(no log: {error})"


def _free_port(host: str, preferred: int = 0) -> int:
    """Return the preferred port, or another one if it is 0 or another process has taken it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with listening(host, preferred, "rollout.launch"):
            free = socket.create_server((host, preferred), family=family)
    except ConfigError:
        if preferred == 0:
            raise
        return _free_port(host)
    with free:
        port: int = free.getsockname()[1]
        return port


def stop_all(handles: Sequence[ServerHandle]) -> None:
    """Stop each server, even if stopping another one fails."""
    for handle in handles:
        try:
            handle.stop()
        except OSError:
            continue
