"""Workers on a Ray cluster: actors that map bytes to bytes, replaced when lost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from archon.remote.config import WorkersConfig
from archon.remote.launchers.ray_cluster import actor_options, first_line, join_cluster

START_SECONDS = 120.0
"""Time limit for the start of a worker."""
GRACE_SECONDS = 5.0
"""Time for a canceled call to end before its worker is replaced."""
_MAX_FAILED_STARTS = 3  # consecutive failed constructors, without a live worker, before giving up
_ABSENCE = 3  # multiples of START_SECONDS without a live worker before giving up
_SETTING = "rollout.workers.kind"


class WorkerLostError(RuntimeError):
    """The worker or its node died or cannot be reached; the call may or may not have run."""


class WorkersBrokenError(RuntimeError):
    """No worker can start, or the workers are closed."""


class WorkerActor(ABC):
    """Base class of Ray actors; `path` is the trainer's import path."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]

    async def ready(self) -> None:  # noqa: B027 (returning is enough)
        """Return once the worker has started."""

    async def last(self) -> None:
        """Wait forever; Ray raises in the caller once the worker is gone."""
        await asyncio.Event().wait()

    @abstractmethod
    async def run(self, call: bytes) -> bytes:
        """Return the answer to a call."""


class RayWorkers:
    """Pool of `count` actors spread over the cluster's nodes and started with the first call.

    A call waits for a worker with fewer than `max_concurrent` calls. Losing a worker costs the calls it executes.
    Several loops and threads may call the workers. The workers end with this process.

    Args:
        actor: the class, from a module that the nodes can import.
        arguments: constructor arguments after the path.
        config: resources of a worker.
        count: number of actors.
        max_concurrent: concurrent calls per actor.
        purpose: purpose of the workers, for messages.
    """

    def __init__(
        self,
        actor: type[WorkerActor],
        arguments: Sequence[Any],
        config: WorkersConfig,
        count: int,
        max_concurrent: int,
        purpose: str,
    ) -> None:
        self._ray = join_cluster(_SETTING)
        options = actor_options(config.resources) | {"max_concurrency": max_concurrent + 2}  # for `ready` and `last`
        self._target_count = {name: options[name] for name in ("num_cpus", "num_gpus", "resources")}
        self._class = self._ray.remote(actor).options(**options)
        self._arguments, self._count, self._max_concurrent = arguments, count, max_concurrent
        self._description = purpose
        self._alive: set[Any] = set()
        self._slots: asyncio.Queue[Any] = asyncio.Queue()  # a live worker per free call slot; None: broken
        self._failed_starts = 0
        self._absent_since = 0.0  # monotonic time since which no worker is alive
        self._broken: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"archon-ray-{purpose}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Address of this process in the cluster, reachable by its workers."""
        address: str = self._ray.util.get_node_ip_address()
        return address

    async def run(self, call: bytes, seconds: float) -> bytes:
        """Return a worker's answer; its `seconds` start when it gets the call. Canceling the caller cancels the call.

        Raises:
            TimeoutError: no answer in time.
            WorkerLostError: the worker or its node died.
            WorkersBrokenError: no worker can start, or the workers are closed.
        """
        if self._broken is not None:
            raise WorkersBrokenError(self._broken)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(call, seconds), self._loop))

    def close(self) -> None:
        """End the workers; calls without an answer raise WorkersBrokenError."""
        if self._loop.is_closed() or not self._loop.is_running():
            return
        with contextlib.suppress(RuntimeError):  # closed concurrently
            self._loop.call_soon_threadsafe(self._shut_down)
        if threading.current_thread() is not self._thread:
            self._thread.join(10)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
        finally:
            self._loop.close()

    def _shut_down(self) -> None:
        self._mark_broken(f"the {self._description} workers are closed")
        for task in self._tasks:
            task.cancel()
        for worker in self._alive:
            self._kill(worker)
        self._alive.clear()
        self._loop.call_later(0.1, self._loop.stop)  # after waiting callers got the error

    def _mark_broken(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._slots.put_nowait(None)

    async def _run(self, call: bytes, seconds: float) -> bytes:
        if not self._started:
            self._started = True
            self._absent_since = time.monotonic()
            for _ in range(self._count):
                self._spawn(self._start())
        worker = await self._acquire_worker()
        answer = worker.run.remote(call)
        exceptions = self._ray.exceptions
        try:
            async with asyncio.timeout(seconds):
                result: bytes = await answer
        except (asyncio.CancelledError, TimeoutError):
            self._ray.cancel(answer)
            self._spawn(self._after_cancel(worker, answer))
            raise
        except exceptions.RayTaskError:
            self._slots.put_nowait(worker)
            raise
        except exceptions.RayError as error:
            if self._broken is not None:
                raise WorkersBrokenError(self._broken) from None
            self._replace(worker)
            raise WorkerLostError(f"a worker of {self._description} was lost: {first_line(error)}") from None
        self._slots.put_nowait(worker)
        return result

    async def _acquire_worker(self) -> Any:
        """Return a worker with a free slot."""
        while True:
            worker = await self._slots.get()
            if worker is None:
                self._slots.put_nowait(None)
                raise WorkersBrokenError(self._broken)
            if worker in self._alive:
                return worker

    async def _after_cancel(self, worker: Any, answer: Any) -> None:
        """Free the slot of a canceled call once it ends; replace the worker if it does not end."""
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await answer
        except (self._ray.exceptions.TaskCancelledError, self._ray.exceptions.RayTaskError):
            pass  # canceled, or raised before: the worker is healthy
        except (TimeoutError, self._ray.exceptions.RayError):
            self._replace(worker)
            return
        self._slots.put_nowait(worker)

    def _replace(self, worker: Any) -> None:
        if worker in self._alive and self._broken is None:
            self._alive.remove(worker)
            self._absent_since = time.monotonic()
            self._kill(worker)
            self._spawn(self._start())

    async def _start(self) -> None:
        """Start a worker, retrying until it starts or the pool is broken."""
        while self._broken is None:
            worker = self._class.remote(sys.path, *self._arguments)
            try:
                async with asyncio.timeout(START_SECONDS):
                    await worker.ready.remote()
            except asyncio.CancelledError:
                self._kill(worker)
                raise
            except (TimeoutError, self._ray.exceptions.RayError) as error:
                self._kill(worker)
                self._start_failed(error)
                await asyncio.sleep(1)
                continue
            self._failed_starts = 0
            self._alive.add(worker)
            self._spawn(self._watch(worker))
            for _ in range(self._max_concurrent):
                self._slots.put_nowait(worker)
            return

    async def _watch(self, worker: Any) -> None:
        """Replace an idle worker that is lost."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            await worker.last.remote()
        self._replace(worker)

    def _start_failed(self, error: Exception) -> None:
        self._failed_starts += bool(getattr(error, "actor_init_failed", False))
        absent = time.monotonic() - self._absent_since
        if self._alive or (self._failed_starts < _MAX_FAILED_STARTS and absent < _ABSENCE * START_SECONDS):
            return
        reason = " ".join(str(error).split())[-500:]
        if isinstance(error, TimeoutError):
            reason = f"no node has free resources; a worker needs {self._target_count} (rollout.workers.resources)"
        self._mark_broken(f"no worker of {self._description} started on the Ray cluster for {absent:.0f} s: {reason}")

    def _kill(self, worker: Any) -> None:
        if self._ray.is_initialized():  # else Ray ended the worker with this process's connection
            self._ray.kill(worker)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mark_broken(f"workers of {self._description} cannot be started: {first_line(error)}")
