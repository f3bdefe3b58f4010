"""Buckets of weights for one server, which takes them at its own pace while the trainer gathers the next."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Full, Queue
from threading import Event

from archon.remote.http import ServerError
from archon.remote.weight_stream import Bucket

DEPTH = 2
POLL_SECONDS = 0.05


class BucketQueue:
    """A queue of at most `DEPTH` buckets from the trainer's thread to that of a server."""

    def __init__(self) -> None:
        self._queue: Queue[Bucket | Exception | None] = Queue(DEPTH)
        self._closed = Event()

    def put(self, bucket: Bucket | Exception | None) -> None:
        """Wait until there is room, and does nothing once the server takes no more.

        None is the end of the weights; an exception is what kept the trainer from gathering the rest.
        """
        while not self._closed.is_set():
            try:
                self._queue.put(bucket, timeout=POLL_SECONDS)
            except Full:
                continue
            return

    def close(self) -> None:
        """Take no more: the server has everything, or failed."""
        self._closed.set()

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets; raises ServerError where the trainer failed, as the server then has a part of them."""
        while (bucket := self._queue.get()) is not None:
            if isinstance(bucket, Exception):
                raise ServerError(f"the trainer did not gather all weights: {bucket}")
            yield bucket
