"""Servers in a Ray cluster; each belongs to an actor that ends with the trainer."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from archon.remote.launchers.base import END_SECONDS, Command, LocalHandle, ServerHandle
from archon.remote.launchers.ray_cluster import actor_options, first_line, join_cluster
from archon.schema.errors import ConfigError

POLL_SECONDS = 0.2
_SETTING = "rollout.launch.launcher"


class ServerActor:
    """Actor that runs one server on its node. Ray stops the actor with the trainer, and the server ends with the actor.

    The actor needs several threads, because `wait` blocks until the server ends.
    """

    def __init__(self, name: str, command: Command, folder: Path) -> None:
        address = importlib.import_module("ray.util").get_node_ip_address()
        self._server = LocalHandle(name, command, folder, host=address)

    def start(self) -> str:
        """Start the server and return its URL."""
        self._server.folder.mkdir(parents=True, exist_ok=True)
        self._server.start()
        return self._server.url

    def wait(self) -> str:
        """Wait until the server ends, and return how it ended."""
        while (end := self._server.exit_message()) is None:
            time.sleep(POLL_SECONDS)
        return end

    def stop(self) -> None:
        """Stop the server and its child processes."""
        self._server.stop()


class RayHandle(ServerHandle):
    """A server on a node of the cluster. A restart may move it to another node and URL.

    Args:
        name: name in logs.
        command: command of the server.
        folder: folder of its log on the node.
        resources: resources by Ray name; None: one CPU.
        seconds: time-out of the scheduling on a node.
    """

    def __init__(
        self, name: str, command: Command, folder: Path, resources: Mapping[str, float] | None, seconds: float
    ) -> None:
        super().__init__(name)
        self._command, self._folder, self._seconds = command, folder, seconds
        self._options = actor_options(resources)
        self._ray = join_cluster(_SETTING)
        self._actor: Any = None
        self._end: Any = None  # result of the actor's `wait`, ready after the end of server, actor or node
        self._failed_start: str | None = None

    def _start(self) -> None:
        ray, self._end, self._failed_start = self._ray, None, None
        actor_class = ray.remote(ServerActor).options(**self._options, max_concurrency=3)
        try:
            actor = self._actor = actor_class.remote(self.name, self._command, self._folder)
        except ValueError as error:
            raise ConfigError(f"rollout.launch.resources: {first_line(error)}") from None
        try:
            self.url = ray.get(actor.start.remote(), timeout=self._seconds)
        except ray.exceptions.RayError as error:
            ray.kill(actor)
            if isinstance(error, ray.exceptions.GetTimeoutError):
                required = {name: self._options[name] for name in ("num_cpus", "num_gpus", "resources")}
                self._failed_start = (
                    f"Ray did not schedule {self.name} within {self._seconds:g} s; it needs {required} "
                    f"(rollout.launch.resources), and the cluster has {ray.available_resources()} available"
                )
            else:
                self._failed_start = f"{self.name} did not start in the Ray cluster: {first_line(error)}"
            raise ConfigError(f"rollout.launch: {self._failed_start}") from None
        self._end = actor.wait.remote()

    def exit_message(self) -> str | None:
        """Return how the server, its actor or its node ended; None while it runs."""
        if self._end is None or not self._ray.wait([self._end], timeout=0)[0]:
            return self._failed_start
        try:
            end: str = self._ray.get(self._end)
        except self._ray.exceptions.RayError as error:
            return f"{self.name} at {self.url} was lost with its node or actor: {first_line(error)}"
        return end

    def stop(self) -> None:
        """Stop the server and its actor."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        if self._end is not None and self.exit_message() is None:
            try:
                self._ray.get(actor.stop.remote(), timeout=END_SECONDS)
            except self._ray.exceptions.RayError:  # unreachable: Ray stops the actor on its node
                pass
        self._ray.kill(actor)
        self._end = self._failed_start = None
