"""Processes forked from a server with a preloaded engine; they start in milliseconds.

Unlike a fork of this process, they inherit none of its threads, process groups or caches.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.context import ForkServerContext
from multiprocessing.util import get_temp_dir
from pathlib import Path

from archon.schema.children import end_with_parent, keep_folder, marked_environment

PRELOADED_MODULES = ["archon.engine.engine", "torch.distributed.fsdp", "torch.distributed.tensor"]
"""Modules that the server imports when it starts."""


def forkserver_context() -> ForkServerContext:
    """Return a multiprocessing context with a running server; processes call `replace_environment` first."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    if parent_process() is None:  # the folder of a child process may be its parent's
        keep_folder(Path(get_temp_dir()))  # of the server's socket
    # Before Python 3.12.4 the server does not inherit sys.path and silently skips failed imports.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.curdir for entry in sys.path)
    try:
        with marked_environment():
            forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


def replace_environment(environment: dict[str, str]) -> None:
    """Replace the environment inherited from the server by `environment`; end with the server."""
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
