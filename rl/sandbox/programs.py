"""Programs of a sandbox: limits, results, and the interface of what runs them."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from archon.schema.errors import SandboxError

MAX_INPUT_BYTES = 64 << 20
"""Bytes of a program's files, arguments and standard input together."""
MAX_FILES = 4096

Content = str | bytes


@dataclass(frozen=True)
class Limits:
    """Limits of one program, each for all of its processes together. All are enforced while the program runs.

    Args:
        wall_seconds: time from its start.
        cpu_seconds: processor time.
        memory_bytes: memory of the processes. Files count separately, as they are in memory too.
        processes: processes and threads.
        output_bytes: standard output and standard error.
        file_bytes: files that it creates.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 64
    output_bytes: int = 1 << 20
    file_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.name.endswith("_seconds") else (int,)
            if type(value) not in kinds or not 0 < value < 1 << 50 or not math.isfinite(value):
                expected = "a positive number" if len(kinds) == 2 else "a positive integer"
                raise SandboxError(f"limit {field.name}: got {value!r:.80}, expected {expected}")


@dataclass(frozen=True)
class Result:
    """End of a program.

    Args:
        exit_code: its exit code, -N if signal N killed it; None if a limit ended it.
        limit: name of the field of `Limits` that ended it, else None.
        stdout: its standard output, up to the limit.
        stderr: its standard error, up to the limit.
        seconds: wall time.
    """

    exit_code: int | None
    limit: str | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it exited with code 0."""
        return self.exit_code == 0


class Runner(Protocol):
    """Something that runs programs: a local `Sandbox` or a `RemoteSandbox`."""

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, Content] | None = None,
        stdin: Content = "",
        limits: Limits | None = None,
    ) -> Result:
        """Run a program in a new folder with `files` and return how it ended."""
        ...

    def close(self) -> None:
        """Release what the runner holds."""
        ...


def check_program(argv: Sequence[str], files: Mapping[str, Content], stdin: Content) -> None:
    """Raise `SandboxError` for arguments or files that no program can have."""
    if isinstance(argv, str) or not argv or not all(map(_is_word, argv)):
        raise SandboxError(f"argv: got {argv!r:.80}, expected a non-empty list of UTF-8 strings without NUL")
    if not argv[0]:
        raise SandboxError("argv: the program has no name; expected one such as 'python'")
    if len(files) > MAX_FILES:
        raise SandboxError(f"files: got {len(files):,}, expected at most {MAX_FILES:,}")
    for name, content in files.items():
        if not _is_word(name) or not name or name[0] == "/" or name[-1] == "/" or {"..", "."} & {*name.split("/")}:
            raise SandboxError(f"files: got the name {name!r:.80}, expected a relative path without '.' and '..'")
        if not isinstance(content, str | bytes):
            raise SandboxError(f"files: {name!r:.80} is a {type(content).__name__}, expected str or bytes")
    if not isinstance(stdin, str | bytes):
        raise SandboxError(f"stdin is a {type(stdin).__name__}, expected str or bytes")
    size = sum(len(as_bytes(content)) for content in (*argv, *files, *files.values(), stdin))
    if size > MAX_INPUT_BYTES:
        raise SandboxError(f"the program's files and input have {size:,} bytes, expected at most {MAX_INPUT_BYTES:,}")


def program_as_json(
    argv: Sequence[str], files: Mapping[str, Content] | None, stdin: Content, limits: Limits
) -> dict[str, Any]:
    """Return a program as JSON-compatible data, for a worker or a server; raise `SandboxError` if it is invalid."""
    files = files or {}
    check_program(argv, files, stdin)
    return {
        "argv": list(argv),
        "files": {name: base64.b64encode(as_bytes(content)).decode() for name, content in files.items()},
        "stdin": base64.b64encode(as_bytes(stdin)).decode(),
        "limits": limits_as_json(limits),
    }


def _is_word(word: object) -> bool:
    """Return whether it is text that arguments and file names can hold."""
    return isinstance(word, str) and "\0" not in word and word == as_bytes(word).decode()


def as_bytes(content: Content) -> bytes:
    """Return text as UTF-8; a lone surrogate becomes a question mark."""
    return content.encode(errors="replace") if isinstance(content, str) else content


def limits_as_json(limits: Limits) -> dict[str, float]:
    """Return the limits by name."""
    return asdict(limits)
