"""Small parts of a training loop that RL and SFT share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


def due(step: int, every: int) -> bool:
    """Whether something done every `every` steps is due after `step`; never for 0."""
    return every > 0 and step % every == 0


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Put the wall time of the block into `seconds[name]`."""
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
