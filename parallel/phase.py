"""Names for the parts of a training step, for whoever listens: nothing is measured where nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

PhaseName = Literal["forward", "backward", "optimizer"]
Listener = Callable[[str], AbstractContextManager[Any]]

_listener: Listener = nullcontext


def phase(name: PhaseName) -> AbstractContextManager[Any]:
    """The listener's context around a part of the step; an empty one where there is none."""
    return _listener(name)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have `listener` told of every phase within."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
