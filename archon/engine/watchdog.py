"""Where every rank stood when a step took too long."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def stack_file(folder: Path) -> Path:
    """This rank's file among the `folder`'s: rankN.txt."""
    return folder / f"rank{os.environ.get('RANK', '0')}.txt"


@contextmanager
def stall_watch(folder: Path, seconds: float | None) -> Iterator[None]:
    """Write the stacks of all threads to `stack_file(folder)` if what is within is not done after `seconds`; None does
    nothing.

    The work goes on: a rank that waits for another is dumped by its own watch, at the same time. The dump is
    faulthandler's, which needs neither the interpreter's lock nor memory, so that a rank that hangs in a kernel or a
    collective is dumped too. A process has one such watch. Raises OSError where the folder cannot be written.
    """
    if seconds is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with stack_file(folder).open("a") as file:
        faulthandler.dump_traceback_later(seconds, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            if not os.fstat(file.fileno()).st_size:
                stack_file(folder).unlink(missing_ok=True)
