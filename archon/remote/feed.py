"""Queue of weight buckets for one server, so that servers load at different speeds while the trainer gathers."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Full, Queue
from threading import Event

from archon.remote.http import ServerError
from archon.remote.weight_stream import Bucket

DEPTH = 2
POLL_SECONDS = 0.05


class BucketQueue:
    """A queue of at most `DEPTH` buckets from the trainer's thread to a server's thread."""

    def __init__(self) -> None:
        self._queue: Queue[Bucket | Exception | None] = Queue(DEPTH)
        self._closed = Event()

    def put(self, bucket: Bucket | Exception | None) -> None:
        """Wait for space and enqueue; return at once if the queue is closed.

        Args:
            bucket: a bucket, None at the end of the weights, or the trainer's exception.
        """
        while not self._closed.is_set():
            try:
                self._queue.put(bucket, timeout=POLL_SECONDS)
            except Full:
                continue
            return

    def close(self) -> None:
        """Discard further buckets: the server has all weights, or failed."""
        self._closed.set()

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets. Raises ServerError if the trainer failed, because the weights are incomplete."""
        while (bucket := self._queue.get()) is not None:
            if isinstance(bucket, Exception):
                raise ServerError(f"the trainer did not gather all weights: {bucket}")
            yield bucket
