"""Reading of files from untrusted sources: only regular files, and only a limited number of bytes.

A named pipe or a device may never end. Limits are enforced while bytes are read, because a file can grow meanwhile.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from archon.schema.errors import ConfigError, UserError
from archon.schema.exhausted import resource_error_message

YAML_BYTES = 2**23
"""Largest YAML file. The longest real one has some 10 KB, and parsing takes 100 times its bytes in memory."""
JSON_BYTES = 2**27
"""Largest JSON file of a checkpoint. The index of the largest public model has 15 MB."""
TOKENIZER_BYTES = 2**28
"""Largest file of a tokenizer or an image processor. The largest public vocabulary has 35 MB."""
PROMPTS_BYTES = 2**26
"""Largest file of prompts, which is read whole."""

_NAMED_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_SHOWN = 200  # characters of a name in a message


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path for a message: one line, and shortened in the middle if it is long."""
    name = os.fspath(path)
    name = name if name.isprintable() else ascii(name)
    half = _SHOWN // 2
    return name if len(name) <= _SHOWN else f"{name[:half]}…{name[-half:]} ({len(name)} characters)"


def open_regular(
    path: str | os.PathLike[str], error: type[UserError] = ConfigError, *, allow_pipe: bool = False
) -> io.BufferedReader:
    """Open a regular file for binary reading; see `regular_handle` for arguments and errors."""
    return os.fdopen(regular_handle(path, error, allow_pipe=allow_pipe), "rb")


def regular_handle(
    path: str | os.PathLike[str], error: type[UserError] = ConfigError, *, allow_pipe: bool = False
) -> int:
    """Return the descriptor of a regular file, open for reading; the caller closes it.

    Args:
        path: the file, or a link to it.
        error: class of the error.
        allow_pipe: accept a pipe that the shell opened for this process, as for `--config <(command)`.

    Raises:
        UserError: the class `error`, if there is no such file, it cannot be opened, or it is not a regular file.
    """
    name = shown_path(path)
    try:
        # Without O_NONBLOCK the call would wait for the writer of a named pipe. Regular files ignore the flag.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError as reason:  # a NUL character, or a lone surrogate
        raise error(f"{name}: no file can have this name ({reason})") from None
    except OSError as reason:
        if reason.errno == errno.ENXIO:
            raise error(f"{name}: it is a socket or a device, not a regular file") from None
        if reason.errno == errno.ENOENT and os.path.islink(path):
            target = shown_path(os.readlink(path))
            raise error(f"{name}: it is a link to {target}, which does not exist; copy the file instead") from None
        raise error(f"{name}: cannot be read: {_why(reason)}") from None
    mode = os.fstat(handle).st_mode
    if allow_pipe and stat.S_ISFIFO(mode) and Path(path).parent == Path("/dev/fd"):
        os.set_blocking(handle, True)
    elif not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((kind for is_kind, kind in _NAMED_KINDS if is_kind(mode)), "not a file")
        raise error(f"{name}: it is {kind}, not a regular file")
    return handle


def read_limited(
    path: str | os.PathLike[str], limit: int, error: type[UserError] = ConfigError, *, allow_pipe: bool = False
) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; see `regular_handle` for arguments and errors."""
    with open_regular(path, error, allow_pipe=allow_pipe) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = b"" if size > limit else file.read(limit + 1)
        except OSError as reason:
            raise error(f"{shown_path(path)}: cannot be read: {_why(reason)}") from None
    if max(size, len(data)) > limit:
        raise error(f"{shown_path(path)} has {max(size, len(data)):,} bytes; expected at most {limit:,}")
    return data


def require_regular(path: str | os.PathLike[str], limit: int, error: type[UserError] = ConfigError) -> None:
    """Check a file before a library reads it whole; raises the errors of `read_limited`."""
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise error(f"{shown_path(path)} has {size:,} bytes; expected at most {limit:,}")


def require_regular_files(folder: Path, names: tuple[str, ...], limit: int, error: type[UserError]) -> None:
    """Call `require_regular` for each of `names` that exists in `folder`."""
    for name in names:
        if os.path.lexists(folder / name):
            require_regular(folder / name, limit, error)


def _why(reason: OSError) -> str:
    return resource_error_message(reason) or os.strerror(reason.errno or errno.EIO)
