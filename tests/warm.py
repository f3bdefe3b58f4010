"""Code and the command in processes of their own that begin with archon's libraries imported.

A fresh interpreter imports for longer than most commands work. Tests of that beginning itself, of how archon is
imported, of memory limits or the locale, start an interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, TextIO

from archon.engine.forkserver import forkserver_context, replace_environment


def run_code(
    code: str,
    *,
    path: Sequence[Path] = (),
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 280,
) -> subprocess.CompletedProcess[str]:
    """Return what `code` wrote and its exit code, as `python -c` would with `path` in front of sys.path."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        variables = dict(os.environ) if environment is None else environment
        process = forkserver_context().Process(target=_run, args=(code, [*map(str, path)], variables, files, cwd))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(code, timeout)
        assert process.exitcode is not None
        out, err = (file.read_text(encoding="utf-8") if file.exists() else "" for file in files)
        return subprocess.CompletedProcess(code, process.exitcode, out, err)


def run_archon(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Return what `archon ARGUMENTS…` wrote and its exit code."""
    return run_code(f"from archon.cli import main; main({[*map(str, arguments)]!r})")


class Started:
    """A running process, as `subprocess.Popen` has it, with what it writes."""

    def __init__(self, process: Any, stdout: TextIO, stderr: TextIO) -> None:
        self._process, self.stdout, self.stderr = process, stdout, stderr

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises `TimeoutError` where the process goes on."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise TimeoutError(f"process {self.pid} goes on after {timeout:g} s")
        return int(self._process.exitcode)


@contextmanager
def started_code(code: str) -> Iterator[Started]:
    """Start `code` in a process whose output is read while it runs, and which is killed at the end of the block."""
    pipes = [os.pipe() for _ in range(2)]
    process = forkserver_context().Process(
        target=_start, args=(code, dict(os.environ), [DupFd(end) for _, end in pipes])
    )
    process.start()
    for _, end in pipes:
        os.close(end)
    with os.fdopen(pipes[0][0]) as stdout, os.fdopen(pipes[1][0]) as stderr:
        try:
            yield Started(process, stdout, stderr)
        finally:
            process.kill()
            process.join()


def _run(code: str, path: list[str], environment: dict[str, str], files: list[Path], cwd: Path | None) -> None:
    _begin(environment, [os.open(file, os.O_WRONLY | os.O_CREAT) for file in files])
    sys.path[:0] = path
    if cwd is not None:
        os.chdir(cwd)
    _execute(code)


def _start(code: str, environment: dict[str, str], ends: Sequence[Any]) -> None:
    _begin(environment, [end.detach() for end in ends])
    _execute(code)


def _begin(environment: dict[str, str], outputs: Sequence[int]) -> None:
    replace_environment(environment)
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output, descriptor)
        os.close(output)
    # Those of the server may know its output as a file, with a position.
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))


def _execute(code: str) -> None:
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
