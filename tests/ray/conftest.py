"""A Ray cluster of one node for all tests here, joined by this process as its driver."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archon.remote.http import KEY
from archon.remote.launchers.ray_cluster import join_cluster
from tests.ray.node import RayNode
from tests.rl.conftest import blank, tokenizer

__all__ = ["blank", "tokenizer"]


@pytest.fixture(scope="session")
def node() -> Iterator[RayNode]:
    """The head and only node, whose address RAY_ADDRESS is."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # not pytest's: the names of its sockets would be too long
    started = RayNode(folder)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = started.address
    try:
        yield started.wait()
    finally:
        os.environ.pop("RAY_ADDRESS") if before is None else os.environ.update(RAY_ADDRESS=before)
        started.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray(node: RayNode) -> Iterator[Any]:
    """The module, connected to the cluster."""
    module = join_cluster("a test")
    yield module
    module.shutdown()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
