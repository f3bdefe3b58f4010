"""A folder for the pushes of one process; it is removed with its process, or after a kill by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

PREFIX = "archon-pushes-"


class PrivateDirectory:
    """A new, locked folder in `parent`, by default the folder of temporary files.

    The operating system releases the lock when the process ends, also after a kill. A new `PrivateDirectory` removes
    unlocked folders next to it. `close` and the end of the interpreter remove the folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        # The folder gets its final name after it is locked, so that no process sees it unlocked.
        unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
        self._lock = os.open(unlocked, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks; nobody can lock it there, so nobody removes it
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unlocked.rename(unlocked.with_name(unlocked.name[1:]))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        _remove_unlocked(self.path.parent)

    def close(self) -> None:
        """Remove the folder."""
        if self._remove.alive:
            self._remove()
            os.close(self._lock)


def _remove_unlocked(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's folder, just removed, or locked by its process
            file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)
