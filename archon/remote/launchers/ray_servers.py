"""Servers on the nodes of a Ray cluster, each held by an actor that ends with the trainer."""

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
    """Holds one server on its node. Ray ends it with the trainer, by whatever that ends, and its keeper the server.

    It answers in several threads, as `wait` lasts as long as the server.
    """

    def __init__(self, name: str, command: Command, folder: Path) -> None:
        address = importlib.import_module("ray.util").get_node_ip_address()
        self._server = LocalHandle(name, command, folder, host=address, detached=True)

    def start(self) -> str:
        """Start the server and returns its URL, at which it will listen."""
        self._server.folder.mkdir(parents=True, exist_ok=True)
        self._server.start()
        return self._server.url

    def wait(self) -> str:
        """Return how the server ended, once it has."""
        while (end := self._server.exit_message()) is None:
            time.sleep(POLL_SECONDS)
        return end

    def stop(self) -> None:
        """End the server and whatever it started."""
        self._server.stop()


class RayHandle(ServerHandle):
    """A server on some node of the cluster. One that is started again may be on another node, with another URL.

    Args:
        resources: that it takes of its node, by Ray's names; None: a CPU.
        seconds: until a node must have taken it.
    """

    def __init__(
        self, name: str, command: Command, folder: Path, resources: Mapping[str, float] | None, seconds: float
    ) -> None:
        super().__init__(name)
        self._command, self._folder, self._seconds = command, folder, seconds
        self._options = actor_options(resources)
        self._ray = join_cluster(_SETTING)
        self._actor: Any = None
        self._end: Any = None  # the answer of its `wait`, which comes with the end of server, actor or node
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
                wanted = {name: self._options[name] for name in ("num_cpus", "num_gpus", "resources")}
                self._failed_start = (
                    f"no node of the Ray cluster took {self.name} within {self._seconds:g} s; it needs {wanted} "
                    f"(rollout.launch.resources), and there are free {ray.available_resources()}"
                )
            else:
                self._failed_start = f"{self.name} did not start on a node of the Ray cluster: {first_line(error)}"
            raise ConfigError(f"rollout.launch: {self._failed_start}") from None
        self._end = actor.wait.remote()

    def exit_message(self) -> str | None:
        if self._end is None or not self._ray.wait([self._end], timeout=0)[0]:
            return self._failed_start
        try:
            end: str = self._ray.get(self._end)
        except self._ray.exceptions.RayError as error:
            return f"{self.name} at {self.url} was lost with its node or its actor: {first_line(error)}"
        return end

    def stop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        if self._end is not None and self.exit_message() is None:
            try:
                self._ray.get(actor.stop.remote(), timeout=END_SECONDS)
            except self._ray.exceptions.RayError:  # it cannot be reached: Ray ends the actor where it is
                pass
        self._ray.kill(actor)
        self._end = self._failed_start = None
