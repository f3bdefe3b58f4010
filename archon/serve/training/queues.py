"""Queues of models: requests of one model in their order, and losses of several models in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from archon.schema.errors import UserError
from archon.schema.exhausted import resource_error_message
from archon.serve.preparation import Preparation
from archon.serve.sessions import LimitError
from archon.serve.training.activity import Activity
from archon.serve.training.trainer import Trainer
from archon.serve.training.wire import LossRequest, loss_response

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Maximum waiting requests of a model; the SDK repeats further ones later."""
MAX_AHEAD = 4096
"""Maximum distance of a request from the next one to run; the SDK sends requests in order, some at the same time."""
MAX_WAITING_TOKENS = 1 << 24
"""Maximum tokens of all waiting requests; a token with its inputs takes 20 to 30 bytes."""
BATCH_TOKENS = 1 << 16
"""Tokens of one batch: more models in a batch share the weights' memory traffic, and wait longer for its end."""

WINDOW_SHARE, WINDOW_SECONDS = 0.5, 0.04
"""Longest wait of a batch for further models: a share of the last batch's time, and seconds. A model that joins a small
batch saves the time that does not depend on the batch's size, about half of it; in a large batch it saves less."""

GAP_SECONDS = 300.0
"""Seconds that requests wait for a missing one before them; the SDK repeats a request for that long."""

Result = TypeVar("Result")
Work = LossRequest | UserError | Callable[[], dict[str, Any]]
"""A loss, a request that was refused, or another operation, which returns its JSON response."""


@dataclass(frozen=True)
class Task:
    """A queued request; `future` is the id of its future. Optimizer steps are `short`."""

    future: str
    work: Work
    short: bool = False

    @property
    def kind(self) -> str | None:
        """Kind of the task. Tasks of the same kind run together; a task without a kind runs alone."""
        if self.loss is not None:
            return "backward" if self.loss.backward else "forward"
        return "short" if self.short else None

    @property
    def loss(self) -> LossRequest | None:
        """The request, if it is a loss."""
        return self.work if isinstance(self.work, LossRequest) else None

    @property
    def n_tokens(self) -> int:
        """Tokens that the task holds in memory."""
        return 0 if self.loss is None else self.loss.n_tokens


@dataclass
class ModelQueue:
    """Requests of one model by sequence id; `next_id` is the next to run.

    Attributes:
        idle_since: when the last result was sent, if no request has arrived since.
        pause: seconds between the last result before and the next request.
        awaited: whether a batch may wait for the next request.
    """

    model: str
    owner: str
    next_id: int = 0
    turn: int = 0
    gap_since: float | None = None
    idle_since: float | None = None
    pause: float = 0.0
    awaited: bool = False
    waiting: dict[int, Task] = field(default_factory=dict)

    @property
    def head(self) -> Task | None:
        """The next request, if it has arrived."""
        return self.waiting.get(self.next_id)

    def pop(self) -> Task:
        """Remove the next request."""
        task = self.waiting.pop(self.next_id)
        self.next_id += 1
        return task


class Queues:
    """Runs the requests of all models in one engine thread.

    Clients take turns, and so do the models of a client. A batch starts with one model, and waiting losses of the other
    models join it. Optimizer steps come first, and a batch waits briefly for models that will soon send a request,
    so that clients that train at the same time share batches.

    Args:
        trainer: used in the engine thread only.
        finish: receives a future's id, its body and whether that is protobuf; called on the event loop.
    """

    def __init__(self, trainer: Trainer, finish: Callable[[str, bytes, bool], None]) -> None:
        self._trainer, self._finish = trainer, finish
        self._queues: dict[str, ModelQueue] = {}
        self._owner_turns: dict[str, int] = {}
        self._clock = self._tokens = 0
        self._batch_seconds = 0.0  # of the last batch of losses
        self._window_ends: float | None = None  # of the batch that waits for further models
        self._wake = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archon-training")
        self._runner = self.loop.create_task(self._run(), name="archon-training")
        self.activity = Activity()
        self.batches: list[int] = []
        """The number of models in each batch of losses."""

    def __contains__(self, model: str) -> bool:
        return model in self._queues

    def open(self, model: str, owner: str) -> None:
        """Start the queue of a new model, whose first request has sequence id 0."""
        self._queues[model] = ModelQueue(model, owner)

    def check(self, model: str, sequence_id: int) -> None:
        """Raise for a request that cannot be queued.

        Raises:
            UserError: the sequence id was used before, or is far ahead.
            LimitError: too many requests are waiting; the client should repeat it.
        """
        queue = self._queues[model]
        if sequence_id < queue.next_id or sequence_id in queue.waiting:
            raise UserError(f"sequence id {sequence_id} of model {model} was used before, and its result has expired")
        if sequence_id > queue.next_id + MAX_AHEAD:
            raise UserError(
                f"sequence id {sequence_id} of model {model} is too far ahead; expected at most {MAX_AHEAD} more than "
                f"{queue.next_id}, the next one"
            )
        # The next request always enters: the others wait for it.
        if sequence_id > queue.next_id and (len(queue.waiting) >= MAX_WAITING or self._tokens >= MAX_WAITING_TOKENS):
            raise LimitError(f"{len(queue.waiting)} requests of model {model} are waiting; try again")

    def submit(self, model: str, sequence_id: int, task: Task) -> None:
        """Queue a request; call `check` first."""
        queue = self._queues[model]
        if queue.idle_since is not None:
            queue.pause, queue.idle_since = time.monotonic() - queue.idle_since, None
        queue.waiting[sequence_id] = task
        self._tokens += task.n_tokens
        self._wake.set()

    def close_model(self, model: str, reason: str) -> None:
        """Fail the waiting requests of a model, and free its memory after the running batch."""
        queue = self._queues.pop(model, None)
        if queue is None:
            return
        self.activity.remove(model)
        if all(other.owner != queue.owner for other in self._queues.values()):
            self._owner_turns.pop(queue.owner, None)
        for task in queue.waiting.values():
            self._tokens -= task.n_tokens
            self._fail(task, UserError(reason))
        self._thread.submit(self._trainer.remove, model)
        self._thread.submit(self.activity.remove, model)  # a running batch may have counted tokens since

    def waiting(self, model: str | None = None) -> int:
        """Return the number of waiting requests of a model, or of all models."""
        return sum(len(queue.waiting) for queue in self._queues.values() if model in (None, queue.model))

    def fail_gaps(self) -> None:
        """Fail requests that wait for one that never arrived, for example because its body was refused."""
        now = time.monotonic()
        for queue in self._queues.values():
            if not queue.waiting or queue.head is not None:
                queue.gap_since = None
                continue
            queue.gap_since = now if queue.gap_since is None else queue.gap_since
            if now - queue.gap_since > GAP_SECONDS:
                missing, waiting = queue.next_id, queue.waiting
                queue.next_id, queue.waiting = max(waiting) + 1, {}
                for task in waiting.values():
                    self._tokens -= task.n_tokens
                    self._fail(
                        task, UserError(f"request {missing} before this one did not arrive in {GAP_SECONDS:g} s")
                    )

    async def stop(self) -> None:
        """Wait for the running batch and stop."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            ready = [queue for queue in self._queues.values() if queue.head is not None]
            if not ready:
                await self._wake.wait()
                continue
            if (seconds := self._window(ready)) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), seconds)
                continue
            batch = self._next(ready)
            begun = time.monotonic()
            with Preparation.short_switches():  # next to requests that arrive
                outcomes = await self.loop.run_in_executor(self._thread, self._execute, batch)
            if batch[0][1].loss is not None:
                self._batch_seconds = time.monotonic() - begun
            for (model, task), outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    self._fail(task, outcome)
                else:
                    if task.kind == "short" and model in self._queues:
                        self.activity.stepped(model)
                    self._finish(task.future, outcome, task.loss is not None)
                queue = self._queues.get(model)
                if queue is not None and not queue.waiting:
                    queue.idle_since, queue.awaited = time.monotonic(), True

    def _window(self, ready: Sequence[ModelQueue]) -> float:
        """Return the seconds that a batch of losses waits for models that will soon send a request."""
        heads = [queue.head for queue in ready]
        if any(task is None or task.loss is None for task in heads):
            return 0.0
        now = time.monotonic()
        if self._window_ends is None:
            self._window_ends = now + min(WINDOW_SHARE * self._batch_seconds, WINDOW_SECONDS)
        ends = self._window_ends
        late = False
        for queue in self._queues.values():
            if queue.awaited and queue.idle_since is not None and queue.idle_since + queue.pause < ends:
                late = True
                queue.awaited = now < ends  # once after each result
        return max(ends - now, 0.0) if late else 0.0

    def _next(self, ready: list[ModelQueue]) -> list[tuple[str, Task]]:
        """Remove the next requests: requests of the same kind from several models, or one that runs alone."""
        ready.sort(
            key=lambda queue: (queue.head.kind != "short", self._owner_turns.get(queue.owner, 0), queue.turn)  # type: ignore[union-attr]
        )
        self._clock += 1
        self._window_ends = None
        batch: list[tuple[str, Task]] = []
        tokens, kind = 0, None
        for queue in ready:
            while (task := queue.head) is not None:
                if batch and (task.kind is None or task.kind != kind):
                    break
                if batch and tokens + task.n_tokens > BATCH_TOKENS:
                    break
                if batch and len({queue.model, *(model for model, _ in batch)}) > self._trainer.max_resident:
                    break
                batch.append((queue.model, queue.pop()))
                queue.turn = self._owner_turns[queue.owner] = self._clock
                if task.kind is None:
                    return batch
                tokens, kind = tokens + task.n_tokens, task.kind
        self._tokens -= tokens
        if kind != "short":
            self.batches = [*self.batches[-99:], len({model for model, _ in batch})]
        return batch

    def _execute(self, batch: list[tuple[str, Task]]) -> Sequence[bytes | Exception]:
        """Run a batch in the engine thread; return the body or the error of each request."""
        losses = [(model, task.loss) for model, task in batch if task.loss is not None]
        if not losses:
            return [_attempt(partial(_operate, task.work)) for _, task in batch]
        outcome = _attempt(lambda: self._run_losses(losses))
        return [outcome] * len(batch) if isinstance(outcome, Exception) else outcome

    def _run_losses(self, losses: Sequence[tuple[str, LossRequest]]) -> list[bytes]:
        bodies = []
        for (model, request), result in zip(losses, self._trainer.run(losses), strict=True):
            if request.backward:
                self.activity.trained(model, result.total, request.n_tokens)
            bodies.append(loss_response(result))
        return bodies

    def _fail(self, task: Task, error: BaseException) -> None:
        self._finish(task.future, failure(error), False)


def _operate(work: Work) -> bytes:
    """Run an operation other than a loss."""
    if isinstance(work, UserError):
        raise work
    assert callable(work)
    return json.dumps(work()).encode()


def _attempt(work: Callable[[], Result]) -> Result | Exception:
    """Return the result of `work`, or its error, which is logged unless it is the client's."""
    try:
        return work()
    except Exception as error:
        if not isinstance(error, UserError) and resource_error_message(error) is None:
            logger.exception("a request of the training service failed")
        return error


def failure(error: BaseException) -> bytes:
    """Return the body of a failed future."""
    if isinstance(error, UserError):
        return json.dumps({"error": str(error), "category": "user"}).encode()
    message = resource_error_message(error) if isinstance(error, Exception) else None
    text = message or f"internal error ({type(error).__name__}: {error!s:.300}); the server's log has the details"
    return json.dumps({"error": text, "category": "server"}).encode()
