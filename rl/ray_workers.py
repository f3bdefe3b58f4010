"""Workers on the nodes of a Ray cluster: actors that answer bytes with bytes, and are replaced when they are lost."""

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
"""Until a worker must have started, where the cluster has a place for it."""
GRACE_SECONDS = 5.0
"""For a call that was canceled to end; a worker whose call does not is replaced."""
_MAX_FAILED_STARTS = 3  # in a row, of constructors, after which workers without a live one are considered broken
_ABSENCE = 3  # times START_SECONDS without a live worker, after which they are too
_SETTING = "rollout.workers.kind"


class WorkerLostError(RuntimeError):
    """The worker of a call, or its node, died or cannot be reached; the call may have been executed or not."""


class WorkersBrokenError(RuntimeError):
    """No worker can be started, or they are closed."""


class WorkerActor(ABC):
    """A worker on its node; `path` is where this process and the trainer's import from."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path[:] = [*path, *(own for own in sys.path if own not in path)]

    async def ready(self) -> None:  # noqa: B027 (its answer is all)
        """Is answered once the worker has started."""

    async def last(self) -> None:
        """Is answered by Ray alone, with an error, once the worker is gone."""
        await asyncio.Event().wait()

    @abstractmethod
    async def run(self, call: bytes) -> bytes:
        """Return the answer to a call."""


class RayWorkers:
    """`count` actors of one class, spread over the nodes of the cluster and started with the first call.

    A call waits for a worker that has less than `max_concurrent` calls; what it costs to lose one is the calls that it
    executes. The workers may be called from several loops and threads, and end with this process, however it ends.

    Args:
        actor: the class, of a module that the nodes can import.
        arguments: of its constructor, after the path.
        config: what a worker takes of its node.
        what: the workers do, for messages.
    """

    def __init__(
        self,
        actor: type[WorkerActor],
        arguments: Sequence[Any],
        config: WorkersConfig,
        count: int,
        max_concurrent: int,
        what: str,
    ) -> None:
        self._ray = join_cluster(_SETTING)
        options = actor_options(config.resources) | {"max_concurrency": max_concurrent + 2}  # for `ready` and `last`
        self._target_count = {name: options[name] for name in ("num_cpus", "num_gpus", "resources")}
        self._class = self._ray.remote(actor).options(**options)
        self._arguments, self._count, self._max_concurrent, self._description = arguments, count, max_concurrent, what
        self._alive: set[Any] = set()
        self._places: asyncio.Queue[Any] = asyncio.Queue()  # a live worker for each call that it may take; None: broken
        self._failed_starts = 0
        self._absent_since = 0.0  # monotonic seconds at which there was no live worker any more
        self._broken: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"archon-ray-{what}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Returns this process's address in the cluster, at which its workers reach it."""
        address: str = self._ray.util.get_node_ip_address()
        return address

    async def run(self, call: bytes, seconds: float) -> bytes:
        """Return the answer of a worker, which has `seconds` from when it gets the call. A caller that is canceled
        cancels the call.

        Raises TimeoutError, WorkerLostError, WorkersBrokenError, or what Ray makes of an exception of the worker's.
        """
        if self._broken is not None:
            raise WorkersBrokenError(self._broken)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(call, seconds), self._loop))

    def close(self) -> None:
        """End the workers; calls without an answer raise WorkersBrokenError."""
        if self._loop.is_closed() or not self._loop.is_running():
            return
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile
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
        self._loop.call_later(0.1, self._loop.stop)  # after those that wait were told

    def _mark_broken(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._places.put_nowait(None)

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
            self._places.put_nowait(worker)
            raise
        except exceptions.RayError as error:
            if self._broken is not None:
                raise WorkersBrokenError(self._broken) from None
            self._replace(worker)
            raise WorkerLostError(f"a worker of {self._description} was lost: {first_line(error)}") from None
        self._places.put_nowait(worker)
        return result

    async def _acquire_worker(self) -> Any:
        """Return a worker that may take a call."""
        while True:
            worker = await self._places.get()
            if worker is None:
                self._places.put_nowait(None)
                raise WorkersBrokenError(self._broken)
            if worker in self._alive:
                return worker

    async def _after_cancel(self, worker: Any, answer: Any) -> None:
        """Give the place of a canceled call to others once it has ended; where it does not, replaces the worker."""
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await answer
        except (self._ray.exceptions.TaskCancelledError, self._ray.exceptions.RayTaskError):
            pass  # it was canceled, or raised before: either way the worker is well
        except (TimeoutError, self._ray.exceptions.RayError):
            self._replace(worker)
            return
        self._places.put_nowait(worker)

    def _replace(self, worker: Any) -> None:
        if worker in self._alive and self._broken is None:
            self._alive.remove(worker)
            self._absent_since = time.monotonic()
            self._kill(worker)
            self._spawn(self._start())

    async def _start(self) -> None:
        """Start a worker, as often as it takes."""
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
                self._places.put_nowait(worker)
            return

    async def _watch(self, worker: Any) -> None:
        """Replace a worker that is lost while it has no call."""
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
            reason = f"no node took one; one needs {self._target_count} (rollout.workers.resources)"
        self._mark_broken(f"no worker of {self._description} started on the Ray cluster for {absent:.0f} s: {reason}")

    def _kill(self, worker: Any) -> None:
        if self._ray.is_initialized():  # else Ray has ended it with this process's connection
            self._ray.kill(worker)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mark_broken(f"workers of {self._description} cannot be started: {first_line(error)}")
