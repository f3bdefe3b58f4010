"""The sandbox of this process, shared by rewards and tools."""

from __future__ import annotations

import os
import threading

from archon.rl.sandbox.local import Sandbox
from archon.rl.sandbox.programs import Runner
from archon.rl.sandbox.remote import KEY_VARIABLE, URL_VARIABLE, RemoteSandbox

_lock = threading.Lock()
_runners: dict[int, Runner] = {}  # by process: a fork gets its own


def default_runner() -> Runner:
    """Return the sandbox of this process, started at the first call.

    It is the server that `ARCHON_SANDBOX_URL` names (with the key in `ARCHON_SANDBOX_KEY`), else a local `Sandbox`.
    """
    with _lock:
        runner = _runners.get(os.getpid())
        if runner is None:
            url = os.environ.get(URL_VARIABLE)
            runner = RemoteSandbox(url, os.environ.get(KEY_VARIABLE, "")) if url else Sandbox()
            _runners[os.getpid()] = runner
        return runner
