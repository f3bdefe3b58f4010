"""Save checkpoints in the background while training continues."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

from archon.checkpoint.native import prepare_save
from archon.parallel.failure import is_collective_error
from archon.schema.errors import UserError

logger = logging.getLogger(__name__)


_writing: WeakSet[Saver] = WeakSet()
"""Savers that are writing. A save is a collective, so a process writes one checkpoint at a time over all engines."""


class Saver:
    """Writer of one checkpoint at a time, in the calling thread or in a background thread.

    A background error is logged at once and raised by the next `save` or `wait`. The process does not exit before the
    thread has finished. All ranks must make the same calls in the same order.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        root: str | os.PathLike[str],
        step: int,
        state: Mapping[str, Any],
        keep: int | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
    ) -> None:
        """Call `native.save_state` after any earlier save has finished.

        With `asynchronous`, return once this rank's shards are copied to the CPU.
        """
        self.wait()
        for other in list(_writing):
            other._join()
        write = prepare_save(root, step, state, keep, fingerprint, snapshot=asynchronous)
        if not asynchronous:
            write()
            return

        def work() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error
                # The message of a UserError, such as a full disk, is enough; a traceback adds nothing.
                trace = None if isinstance(error, UserError) else error
                # If another rank ended during the save, its report has the reason.
                level = logging.INFO if is_collective_error(error) else logging.ERROR
                logger.log(
                    level,
                    "the checkpoint of step %d was not written to %s: %s",
                    step,
                    Path(root),
                    error,
                    exc_info=trace,
                )

        self._thread = threading.Thread(target=work, name=f"archon-save-{step}")
        self._thread.start()
        _writing.add(self)

    def wait(self) -> None:
        """Wait until the current checkpoint is on disk; raise the error of a failed save."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _writing.discard(self)
