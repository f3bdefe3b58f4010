"""Work on a request outside the event loop: parsing, rendering, tokenizing and decoding images.

The event loop samples and answers `/health`, so nothing else may hold it for long. Small work stays on the loop, where
it takes less time than a change of threads. Large work runs in a few threads.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

SMALL_BYTES = 1 << 14
"""Maximum size of a request that is prepared on the event loop, which takes some milliseconds."""
THREADS = 2
"""Maximum threads of large work; each may hold one decoded image of the maximum size."""
SWITCH_SECONDS = 2e-4
"""Seconds that a thread may keep Python's lock during large work.

A sampling step takes the lock again after each of its hundreds of operators. With Python's default of 5 ms, one step
next to a busy thread would take seconds.
"""


class Preparation:
    """Runs the work of a server's requests, at most `THREADS` at once; further work waits for its turn."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _busy: ClassVar[int] = 0  # large work of all servers of this process
    _interval: ClassVar[float] = 0.0  # Python's own, meanwhile

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[..., T], *args: Any, size: int) -> T:
        """Return the result of `work`, for a request of `size` bytes.

        Canceling drops work that has not started; work in progress ends by itself, within the limits of a request.
        """
        if size <= SMALL_BYTES:
            return work(*args)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="archon-request")
        return await asyncio.get_running_loop().run_in_executor(self._pool, _run_large, work, *args)

    def close(self) -> None:
        """Drop waiting work; threads end once they are idle."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    @classmethod
    @contextmanager
    def short_switches(cls) -> Iterator[None]:
        """Let other threads run often."""
        with cls._lock:
            if cls._busy == 0:
                cls._interval = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_SECONDS, cls._interval))
            cls._busy += 1
        try:
            yield
        finally:
            with cls._lock:
                cls._busy -= 1
                if cls._busy == 0:
                    sys.setswitchinterval(cls._interval)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage while JSON is parsed or written.

    Each collection reads every object so far again, and no thread runs meanwhile: two million lists take 2.4 s with
    collections, and 0.3 s without. One thread at a time, so that the objects of two do not add up.
    """
    with _NO_COLLECTION:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def skip_loaded_objects() -> None:
    """Let later garbage collections skip all present objects.

    Call it once the model is loaded: a full collection reads each object of PyTorch and transformers, which takes
    0.2 s, and nothing else runs meanwhile.
    """
    gc.collect()
    gc.freeze()


_NO_COLLECTION = threading.Lock()


def _run_large(work: Callable[..., T], *args: Any) -> T:
    with Preparation.short_switches():
        return work(*args)
