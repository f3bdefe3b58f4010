"""Servers for rollouts on this machine, each a process of its own: the twin of vLLM that the tests ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import ROOT, BenchmarkError

SLOTS = 128
END_SECONDS = 20


@contextmanager
def serving(checkpoint: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts servers of a checkpoint, and ends them with the block; `url_of` has their addresses."""
    command = [sys.executable, "-m", "tests.remote.serve_twin", str(checkpoint), str(SLOTS)]
    command.append(str(json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]))
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            environment = {"OMP_NUM_THREADS": "1"} | os.environ
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes))
        yield started
    finally:
        for server in started:
            assert server.stdin is not None
            server.stdin.close()
        for server in started:
            try:
                server.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()


def url_of(server: subprocess.Popen[str]) -> str:
    """Returns the server's URL, once it has begun. Raises BenchmarkError where it has not."""
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    if not url:
        raise BenchmarkError(f"a server ended with {server.wait()} before it served")
    return url


def warmed_up(bootstrap: Path, path: Path) -> Path:
    """Returns `path`, where the checkpoint that a bootstrap file describes was made."""
    command = [sys.executable, "-m", "archon", "bootstrap", "--config", str(bootstrap), f"path={path}"]
    code = subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | os.environ, cwd=ROOT, check=False).returncode
    if code:
        raise BenchmarkError(f"archon bootstrap ended with {code}")
    return path
