"""Atomic writes of folders and files, with named kill points for fault-injection tests.

A folder is written next to its destination under a temporary name, every file and folder is synced, and one rename
makes it visible. The temporary folder is locked while its writer runs. The next save removes unlocked temporary
folders, which killed writers left.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from archon.schema.errors import CheckpointError, ConfigError

KILL_AT = "ARCHON_KILL_AT"
# In the order of a save. `test_kill` kills a process at each.
KILL_POINTS = (
    "save.begin",
    "save.staged",
    "save.tensor",
    "save.tensors_written",
    "save.all_written",
    "save.manifest_written",
    "save.renamed",
    "save.latest_written",
    "save.latest_renamed",
    "save.old_hidden",
    "save.end",
    "export.begin",
    "export.staged",
    "export.tensor",
    "export.shard_written",
    "export.shards_named",
    "export.config_written",
    "export.assets_copied",
    "export.published",
    "export.end",
)

_PARTIAL = ".partial-"
_ASIDE = ".replaced"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_kill_point_hits: Counter[str] = Counter()


def kill_point(name: str) -> None:
    """Send SIGKILL to this process at its n-th pass of the point in `ARCHON_KILL_AT=<name>[:n]`; n is 1 by default.

    Raises:
        ConfigError: the variable names no point of `KILL_POINTS`.
    """
    assert name in KILL_POINTS, name
    setting = os.environ.get(KILL_AT)
    if not setting:
        return
    point, _, nth = setting.partition(":")
    if point not in KILL_POINTS or not re.fullmatch(r"\d{0,9}", nth, re.ASCII):
        raise ConfigError(f"{KILL_AT}={setting!r}: expected NAME or NAME:n with NAME one of {', '.join(KILL_POINTS)}")
    _kill_point_hits[name] += 1
    if name == point and _kill_point_hits[name] == int(nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def write_errors(target: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError within the block into a CheckpointError that names `target`."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(target) else ""
        raise CheckpointError(
            f"cannot write {target}{where}: {os.strerror(error.errno) if error.errno else error}; "
            "choose a folder that can be written, with room for the checkpoint"
        ) from error


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that names no file. Failed writes name none; only failed opens do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a locked temporary folder next to `target`; it is removed unless the block renames or publishes it.

    Leftovers of killed writers of the same target are removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, target.name)
    folder = target.with_name(f".{target.name}{_PARTIAL}{secrets.token_hex(4)}")
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(lock)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replaced_export(target: Path, is_part: Callable[[str], bool], kind: str) -> Iterator[Path]:
    """Yield a staged folder that atomically replaces `target`, a missing folder or an earlier export, after the block.

    Args:
        target: folder to create or to replace.
        is_part: whether an export of this kind has an entry of this name; others would be lost and are refused.
        kind: the kind of export with its article, for the error message.
    """
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        undo_replacement(target)
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target}: it is a file; expected a folder to export to")
        for entry in sorted(target.iterdir()) if target.exists() else []:
            if not is_part(entry.name):
                raise CheckpointError(
                    f"{target}: it holds {entry.name!r}, which is not part of {kind} and would be lost; choose another "
                    "folder, or move it away"
                )
        with staged_folder(target) as folder:
            yield folder
            sync_tree(folder)
            publish(folder, target)
            kill_point("export.published")


def remove_leftovers(parent: Path, name: str = "*") -> None:
    """Remove the temporary folders and files that killed writers of `name` (a glob) left in `parent`."""
    for leftover in parent.glob(f".{name}{_PARTIAL}*"):
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink(missing_ok=True)
            continue
        try:
            handle = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            if _lock(handle):
                shutil.rmtree(leftover)
        finally:
            os.close(handle)


def hide(folder: Path) -> Path:
    """Rename a folder to a temporary name and return it, so that an interrupted removal stays invisible."""
    hidden = folder.with_name(f".{folder.name}{_PARTIAL}old")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    sync(folder.parent)
    return hidden


def publish(folder: Path, target: Path) -> None:
    """Move a synced `folder` to `target`, replacing an existing folder.

    An existing `target` is exchanged with `folder` atomically (Linux's `renameat2`), so that it is complete at every
    moment. A file system without exchange (NFS) needs two renames. The previous content is kept under
    `.<name>.replaced` until the second is on disk; `undo_replacement` undoes the first after a kill between them.
    """
    aside = _replaced_path(target)
    if not target.exists():
        folder.rename(target)
    elif not _exchange(folder, target):
        target.rename(aside)
        folder.rename(target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def undo_replacement(target: Path) -> None:
    """Undo the first rename of a `publish` that was killed between its two renames."""
    aside = _replaced_path(target)
    if not aside.exists():
        return
    if target.exists():
        shutil.rmtree(aside)
    else:
        aside.rename(target)


def write_text(path: Path, content: str) -> None:
    """Write a text file. A lone surrogate becomes an escape, as in JSON, and every OSError names the file."""
    with named_errors(path):
        path.write_text(content, encoding="utf-8", errors="backslashreplace")


def write_synced(path: Path, content: str) -> None:
    """Call `write_text` and wait until the file is on disk."""
    write_text(path, content)
    with named_errors(path):
        sync(path)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON and wait until it is on disk."""
    write_synced(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def replace_file(path: Path, content: str, kill_before_rename: str) -> None:
    """Replace a small text file atomically: readers see either the old or the new content."""
    partial = path.with_name(f".{path.name}{_PARTIAL}new")
    write_synced(partial, content)
    kill_point(kill_before_rename)
    partial.replace(path)
    sync(path.parent)


def sync_tree(folder: Path) -> None:
    """Wait until every file and folder beneath `folder` is on disk."""
    for where, _, files in os.walk(folder):
        for name in files:
            sync(Path(where, name))
        sync(Path(where))


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's directory entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replaced_path(target: Path) -> Path:
    return target.with_name(f".{target.name}{_ASIDE}")


def _lock(handle: int) -> bool:
    """Try to lock a folder; return False if it is locked or its file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; return False if the operating or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if not renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))
