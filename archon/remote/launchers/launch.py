"""`rollout.launch`: servers that the run starts, watches, restarts and stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir

from archon.remote.config import LaunchConfig, PushConfig
from archon.remote.connect import SHARED_MEMORY
from archon.remote.engine import RemoteEngine
from archon.remote.http import CONNECT_SECONDS, Http
from archon.remote.launchers.base import Command, LocalHandle, ServerHandle, stop_all
from archon.remote.launchers.ray_servers import RayHandle
from archon.remote.launchers.slurm import SlurmHandle
from archon.remote.server import RemoteServer
from archon.schema.capacity import rank_limit_error
from archon.schema.errors import ConfigError, RolloutError, UserError

WATCH_SECONDS = 1.0


def push_root(push: PushConfig) -> Path:
    """Return the parent folder of pushes; create a configured folder."""
    if push.folder is None:
        return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(gettempdir())
    folder = Path(push.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass
class LaunchedServers:
    """Servers of one command. `open` starts them, `watch` restarts failed ones, `close` stops them.

    Attributes:
        config: launcher, number of servers and time-outs.
        command: command of each server.
        folder: folder of logs, scripts and URL files.
        log: called with a message for each start, failure and recovery.
        handles: one handle per server.
    """

    config: LaunchConfig
    command: Command
    folder: Path
    log: Callable[[str], None] = print
    handles: list[ServerHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    def open(self) -> list[str]:
        """Start all servers, wait until each accepts connections, and return their URLs.

        Raises:
            ConfigError: a server does not start; the message has the end of its log, and all servers are stopped. Or
                this machine cannot run as many; no server starts.
        """
        if self.config.launcher == "local" and (error := rank_limit_error(self.config.count, "servers")):
            raise ConfigError(f"rollout.launch.count: {error}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.handles = [self._handle(f"server-{number}") for number in range(self.config.count)]
        try:
            with ThreadPoolExecutor(len(self.handles)) as pool:
                list(pool.map(self._start_server, self.handles))
        except BaseException:
            self.close()
            raise
        urls = [handle.url for handle in self.handles]
        self.log(f"launched {len(urls)} {self.config.engine} servers: {', '.join(urls)}; logs in {self.folder}")
        return urls

    def watch(self, engine: RemoteEngine) -> None:
        """Start a thread that restarts failed servers and pushes the weights to them."""
        engine.recovery_timeout = self.config.seconds
        self._watcher = threading.Thread(target=self._watch, args=[engine], name="archon-servers", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Stop all servers."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join(5 * WATCH_SECONDS)
            if self._watcher.is_alive():
                stop_all(self.handles)  # the watcher may wait for the resources of a server that it starts
                self._watcher.join(self.config.seconds)
        stop_all(self.handles)

    def _handle(self, name: str) -> ServerHandle:
        config = self.config
        if config.launcher == "ray":
            return RayHandle(name, self.command, self.folder, config.resources, config.seconds)
        if config.launcher == "slurm":
            return SlurmHandle(name, self.command, self.folder, config.sbatch, config.seconds)
        return LocalHandle(name, self.command, self.folder)

    def _start_server(self, handle: ServerHandle) -> None:
        """Start a server and wait until it listens. Raises ConfigError if it does not."""
        handle.start()
        until = time.monotonic() + self.config.seconds
        while not Http(handle.url).is_listening():
            if (end := handle.exit_message()) is not None:
                raise ConfigError(f"rollout.launch: {end}")
            if time.monotonic() > until:
                raise ConfigError(
                    f"rollout.launch: {handle.name} did not listen at {handle.url} within {self.config.seconds:g} s"
                )
            if self._closing.wait(0.2):
                raise ConfigError(f"rollout.launch: the run ended during the start of {handle.name}")

    def _watch(self, engine: RemoteEngine) -> None:
        while not self._closing.wait(WATCH_SECONDS):
            for handle in self.handles:
                server = next((server for server in engine.servers if server.url == handle.url), None)
                if server is None or server.pushing or handle.failed_starts > self.config.restarts:
                    continue
                if server.asleep:  # a server that starts now would take the trainer's memory
                    continue
                end = handle.exit_message()
                if end is None and server.failure is None:
                    handle.failed_starts = 0
                    continue
                try:
                    self._restore(engine, handle, server, end)
                except UserError as error:
                    if not self._closing.is_set():
                        self.log(f"{handle.name} failed to restart: {error}")
                        if handle.failed_starts > self.config.restarts:
                            self.log(f"{handle.name} is abandoned after {handle.failed_starts} starts without a push")

    def _restore(self, engine: RemoteEngine, handle: ServerHandle, server: RemoteServer, end: str | None) -> None:
        """Restore a failed server; restart it first if it does not answer."""
        server.failure = server.failure or end
        if end is None:
            try:
                server.check_health(CONNECT_SECONDS)
            except RolloutError as error:
                if handle.failed_starts and time.monotonic() - handle.started < self.config.seconds:
                    raise  # still starting
                end = str(error)
        if end is not None:
            self.log(f"restarting {handle.name}: {end.splitlines()[0]}")
            old = handle.url
            try:
                self._start_server(handle)
            finally:
                if handle.url != old:
                    server.move(handle.url)
        if engine.restore_server(server):
            handle.failed_starts = 0
            self.log(f"{handle.name} is back with weights of version {server.version}")
