"""A folder of this process for its pushes, which ends with the process; after a kill, another one removes it."""

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
    """A new folder in `parent`, by default that of temporary files.

    Its process holds a lock on it, which the operating system releases when that ends, however. Making a folder removes
    those next to it that nobody has locked. `close` removes the folder, as does the end of the interpreter.
    """

    def __init__(self, parent: Path | None = None) -> None:
        # It gets its name once it is locked, so that nobody sees it unlocked while this process lives.
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
        self._lock = os.open(made, os.O_RDONLY)
        with suppress(OSError):  # of a file system without locks; nobody can take one there either
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name[1:]))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        _remove_unlocked(self.path.parent)

    def close(self) -> None:
        """Remove the folder."""
        if self._remove.alive:
            self._remove()
            os.close(self._lock)


def _remove_unlocked(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, just removed, or locked by its process
            file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)
