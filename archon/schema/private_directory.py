"""A folder of one process; it is removed with its process, also after a kill."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Self

from archon.schema.children import forget_folder, keep_folder


class PrivateDirectory:
    """A new, locked folder `prefix…` in `parent`, by default the folder of temporary files.

    `close` and the end of the interpreter remove the folder. After a kill the keeper of `archon.schema.children` does.
    If the keeper was killed too, the next `PrivateDirectory` with the same `prefix` removes it: the operating system
    releases the lock when the process ends, and a new `PrivateDirectory` removes unlocked folders next to it.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        # The folder gets its final name after it is locked, so that no process sees it unlocked.
        path = Path(parent or tempfile.gettempdir()).absolute() / f"{prefix}{os.urandom(8).hex()}"
        unlocked = path.with_name(f".{path.name}")
        keep_folder(unlocked, path)
        unlocked.mkdir(mode=0o700)
        self._lock = os.open(unlocked, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks; nobody can lock it there, so only the keeper removes it
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unlocked.rename(path)
        self._remove = weakref.finalize(self, _remove, unlocked, path)
        _remove_unlocked(path.parent, prefix)

    def close(self) -> None:
        """Remove the folder."""
        if self._remove.alive:
            self._remove()
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove(unlocked: Path, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    forget_folder(unlocked, path)


def _remove_unlocked(parent: Path, prefix: str) -> None:
    name = re.compile(re.escape(prefix) + "[0-9a-f]{16}")  # a user's folder may have the same prefix
    for folder in filter(lambda folder: name.fullmatch(folder.name), parent.iterdir()):
        with suppress(OSError):  # another user's folder, just removed, or locked by its process
            file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)
