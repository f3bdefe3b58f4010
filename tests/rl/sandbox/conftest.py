from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from archon.rl.sandbox import Sandbox
from archon.rl.sandbox.local import LEVELS, Isolation
from archon.schema.errors import SandboxError
from benchmarks.sandbox_programs import SECRET
from tests.rl.sandbox.sandboxes import STARTED, started


@pytest.fixture(scope="session", autouse=True)
def _close() -> Iterator[None]:
    yield
    for sandbox in STARTED.values():
        if isinstance(sandbox, Sandbox):
            sandbox.close()


def _sandbox(isolation: Isolation) -> Sandbox:
    """The sandbox of an isolation; skips the test where the machine does not allow it."""
    sandbox = started(isolation)
    if isinstance(sandbox, SandboxError):
        pytest.skip(str(sandbox))
    return sandbox


@pytest.fixture(params=["bubblewrap", "namespaces"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """A sandbox that keeps programs from the host."""
    return _sandbox(request.param)


@pytest.fixture(params=LEVELS)
def any_sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """A sandbox of any isolation."""
    return _sandbox(request.param)


@pytest.fixture
def rlimits() -> Sandbox:
    """A sandbox of resource limits alone."""
    return _sandbox("rlimits")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A secret file, an environment variable and listening sockets, which programs must not reach."""
    monkeypatch.setenv("SECRET", SECRET)
    token = f"archon-hostile-{os.urandom(6).hex()}"
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,  # /tmp is another folder in the sandbox
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        Path(folder).chmod(0o755)
        secret = Path(folder, "secret.txt")
        secret.write_text(SECRET)
        path.bind(f"{folder}/socket")
        path.listen()
        abstract.bind(f"\0{token}")
        abstract.listen()
        port = str(server.getsockname()[1])
        yield {"secret": str(secret), "token": token, "port": port, "socket": f"{folder}/socket"}
