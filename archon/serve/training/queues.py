"""Queues of models: requests of one model in their order, and losses of several models in one batch."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from archon.schema.errors import UserError
from archon.schema.exhausted import resource_error_message
from archon.serve.sessions import LimitError
from archon.serve.training.trainer import Trainer
from archon.serve.training.wire import LossRequest, loss_response

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Maximum waiting requests of a model; the SDK repeats further ones later."""
MAX_WAITING_TOKENS = 1 << 24
"""Maximum tokens of all waiting requests; a token with its inputs takes 20 to 30 bytes."""
BATCH_TOKENS = 1 << 16
"""Tokens of one batch: more models in a batch share the weights' memory traffic, and wait longer for its end."""

GAP_SECONDS = 300.0
"""Seconds that requests wait for a missing one before them; the SDK repeats a request for that long."""

Work = LossRequest | UserError | Callable[[], dict[str, Any]]
"""A loss, a request that was refused, or another operation, which returns its JSON response."""


@dataclass(frozen=True)
class Task:
    """A queued request; `future` is the id of its future."""

    future: str
    work: Work

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
    """Requests of one model by sequence id; `next_id` is the next to run."""

    model: str
    owner: str
    next_id: int = 0
    turn: int = 0
    gap_since: float | None = None
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

    Clients take turns, and so do the models of a client. Waiting losses of the other models join the batch of the model
    whose turn it is.

    Args:
        trainer: used in the engine thread only.
        finish: receives a future's id, its body and whether that is protobuf; called on the event loop.
    """

    def __init__(self, trainer: Trainer, finish: Callable[[str, bytes, bool], None]) -> None:
        self._trainer, self._finish = trainer, finish
        self._queues: dict[str, ModelQueue] = {}
        self._owner_turns: dict[str, int] = {}
        self._clock = self._tokens = 0
        self._wake = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archon-training")
        self._runner = self.loop.create_task(self._run(), name="archon-training")
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
            UserError: the sequence id was used before.
            LimitError: too many requests are waiting; the client should repeat it.
        """
        queue = self._queues[model]
        if sequence_id < queue.next_id or sequence_id in queue.waiting:
            raise UserError(f"sequence id {sequence_id} of model {model} was used before, and its result has expired")
        # The next request always enters: the others wait for it.
        if sequence_id > queue.next_id and (len(queue.waiting) >= MAX_WAITING or self._tokens >= MAX_WAITING_TOKENS):
            raise LimitError(f"{len(queue.waiting)} requests of model {model} are waiting; try again")

    def submit(self, model: str, sequence_id: int, task: Task) -> None:
        """Queue a request; call `check` first."""
        self._queues[model].waiting[sequence_id] = task
        self._tokens += task.n_tokens
        self._wake.set()

    def close_model(self, model: str, reason: str) -> None:
        """Fail the waiting requests of a model, and free its memory after the running batch."""
        queue = self._queues.pop(model, None)
        if queue is None:
            return
        for task in queue.waiting.values():
            self._tokens -= task.n_tokens
            self._fail(task, UserError(reason))
        self._thread.submit(self._trainer.remove, model)

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
            batch = self._next()
            if not batch:
                self._wake.clear()
                await self._wake.wait()
                continue
            outcomes = await self.loop.run_in_executor(self._thread, self._execute, batch)
            for (_, task), outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    self._fail(task, outcome)
                else:
                    self._finish(task.future, outcome, task.loss is not None)

    def _next(self) -> list[tuple[str, Task]]:
        """Remove the next requests: losses of one kind of several models, or one other request."""
        ready = [queue for queue in self._queues.values() if queue.head is not None]
        ready.sort(key=lambda queue: (self._owner_turns.get(queue.owner, 0), queue.turn))
        self._clock += 1
        batch: list[tuple[str, Task]] = []
        tokens, backward = 0, None
        for queue in ready:
            while (task := queue.head) is not None:
                if batch and (task.loss is None or task.loss.backward != backward):
                    break
                if batch and tokens + task.n_tokens > BATCH_TOKENS:
                    break
                batch.append((queue.model, queue.pop()))
                queue.turn = self._owner_turns[queue.owner] = self._clock
                if task.loss is None:
                    return batch
                tokens, backward = tokens + task.n_tokens, task.loss.backward
        self._tokens -= tokens
        if batch:
            self.batches = [*self.batches[-99:], len({model for model, _ in batch})]
        return batch

    def _execute(self, batch: list[tuple[str, Task]]) -> list[bytes | BaseException]:
        """Run a batch in the engine thread; return the body or the error of each request."""
        losses = [(model, task.loss) for model, task in batch if task.loss is not None]
        work = batch[0][1].work
        try:
            if losses:
                return [loss_response(result) for result in self._trainer.run(losses)]
            if isinstance(work, UserError):
                return [work]
            assert callable(work)
            return [json.dumps(work()).encode()]
        except Exception as error:
            if not isinstance(error, UserError) and resource_error_message(error) is None:
                logger.exception("a request of the training service failed")
            return [error] * len(batch)

    def _fail(self, task: Task, error: BaseException) -> None:
        self._finish(task.future, failure(error), False)


def failure(error: BaseException) -> bytes:
    """Return the body of a failed future."""
    if isinstance(error, UserError):
        return json.dumps({"error": str(error), "category": "user"}).encode()
    message = resource_error_message(error) if isinstance(error, Exception) else None
    text = message or f"internal error ({type(error).__name__}: {error!s:.300}); the server's log has the details"
    return json.dumps({"error": text, "category": "server"}).encode()
