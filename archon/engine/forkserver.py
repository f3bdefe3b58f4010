"""Processes forked from a server that has imported the engine once: a start takes milliseconds instead of seconds.

Unlike a fork of this process, they inherit no threads, process groups or caches of it.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext

PRELOADED_MODULES = ["archon.engine.engine", "torch.distributed.fsdp", "torch.distributed.tensor"]
"""The modules that the server imports, if it is not running yet."""


def forkserver_context() -> ForkServerContext:
    """Returns the context that starts such processes, its server running; they call `replace_environment` first."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    # Before Python 3.12.4 the server does not inherit sys.path, and skips what it cannot import without a word.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.curdir for entry in sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


def replace_environment(environment: dict[str, str]) -> None:
    """Replace this process's environment, which is that of the server's start, by that of the process that asks."""
    os.environ.clear()
    os.environ.update(environment)
