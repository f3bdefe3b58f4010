"""Small parts of a training loop that RL and SFT share."""

from __future__ import annotations

import gc
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


@contextmanager
def long_lived_objects_frozen() -> Iterator[None]:
    """Keep what exists now out of garbage collection inside the block.

    A rollout makes thousands of short-lived objects a step. Each full collection they cause would walk over everything
    that transformers and the data have loaded, which was a tenth of a small rollout's time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
