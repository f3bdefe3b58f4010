"""Dumps every rank's stacks when a step takes too long."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def stall_watch(folder: Path, seconds: float | None) -> Iterator[None]:
    """Write the stacks of all threads to rankN.txt in `folder` if the block takes longer than `seconds`; None does
    nothing.

    The block continues: a rank that waits for another is dumped by its own watch, at the same time. faulthandler needs
    neither the GIL nor memory, so that a rank that hangs in a kernel or a collective is dumped too. A process can have
    one watch at a time. Raises OSError where the folder cannot be written.
    """
    if seconds is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{os.environ.get('RANK', '0')}.txt"
    with path.open("a") as file:
        faulthandler.dump_traceback_later(seconds, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            if not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)
