"""Phases of a training step for profilers; free without a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

PhaseName = Literal["forward", "backward", "optimizer"]
Listener = Callable[[str], AbstractContextManager[Any]]

_listener: Listener = nullcontext


def phase(name: PhaseName) -> AbstractContextManager[Any]:
    """Return the context of the listener for a phase; a null context without a listener."""
    return _listener(name)


@contextmanager
def phase_listener(listener: Listener) -> Iterator[None]:
    """Enter `listener(name)` around every phase of a step within the block."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
