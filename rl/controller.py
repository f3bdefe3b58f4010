"""Controller: process 0 runs the episodes, and all processes train on them.

The event loop of process 0 keeps the episodes running while a thread computes with the other processes. Those wait for
results in turns of half a second: every process sees a signal, and no collective waits for a whole rollout.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from archon.parallel.control_plane import ControlPlane
from archon.training.loop import run_until_stopped
from archon.training.runner import Runner, StoppedError

Result = TypeVar("Result")
Work = Callable[[], Coroutine[Any, Any, Result]]

TURN_SECONDS = 0.5
DONE = 1000
"""Larger than every signal number: a finished result takes precedence over a signal."""


@dataclass
class Controller:
    """Work on process 0's event loop with results for all processes. Every method is a collective."""

    loop: asyncio.AbstractEventLoop
    runner: Runner | None = None

    def __post_init__(self) -> None:
        self._world = ControlPlane.with_long_timeout("rollouts")

    @property
    def is_main(self) -> bool:
        """Whether this process runs the episodes. Not a collective."""
        return self._world.is_main

    def run(self, work: Work[Result], pack: Callable[[Result], bytes], unpack: Callable[[bytes], Result]) -> Result:
        """Run `work` on process 0 and return its result on all processes, by `pack` and `unpack`.

        Raises:
            StoppedError: a signal asked any process to stop; raised on all processes.
        """
        if self._world.size == 1:
            return run_until_stopped(self.loop, work(), self.runner)
        task = self.loop.create_task(work()) if self.is_main else None
        try:
            while (state := self._wait_turn(task)) != DONE:
                if state and self.runner is not None:
                    self.runner.request_stop(state)
                    raise StoppedError
        finally:
            if task is not None and not task.done():
                task.cancel()
                self.loop.run_until_complete(asyncio.wait({task}))
        data = self._world.broadcast(lambda: pack(task.result()) if task else b"")
        return task.result() if task else unpack(data)

    def run_json(self, work: Work[Result]) -> Result:
        """Run `work` like `run`, with a JSON result."""
        return self.run(work, lambda result: json.dumps(result).encode(), json.loads)

    def _wait_turn(self, task: asyncio.Task[Any] | None) -> int:
        """Wait a turn. Return `DONE`, a signal number or 0, equal on all processes."""
        if task is not None:
            self.loop.run_until_complete(asyncio.wait({task}, timeout=TURN_SECONDS))
            if task.done():
                task.result()  # an error ends this process, and thereby the other processes
                return self._world.all_reduce_max(DONE)
        return self._world.all_reduce_max(self.runner.stop_number if self.runner else 0)
