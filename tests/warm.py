"""Code and the command in processes of their own that begin with archon's libraries imported.

A fresh interpreter imports for longer than most commands work. Tests of that beginning itself, of how archon is
imported, of memory limits or the locale, start an interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from archon.engine.warm_processes import adopt_environment, warm_context


def run_code(
    code: str, *, path: Sequence[Path] = (), environment: dict[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Returns what `code` wrote and its exit code, as `python -c` would with `path` in front of sys.path."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        variables = dict(os.environ) if environment is None else environment
        process = warm_context().Process(target=_run, args=(code, [*map(str, path)], variables, files))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(code, timeout)
        assert process.exitcode is not None
        out, err = (file.read_text(encoding="utf-8") if file.exists() else "" for file in files)
        return subprocess.CompletedProcess(code, process.exitcode, out, err)


def run_archon(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Returns what `archon ARGUMENTS…` wrote and its exit code."""
    return run_code(f"from archon.cli import main; main({[*map(str, arguments)]!r})")


def _run(code: str, path: list[str], environment: dict[str, str], files: list[Path]) -> None:
    adopt_environment(environment)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.path[:0] = path
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
