"""Two hosts, where this machine can make them; elsewhere nothing here is collected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.namespaces import Cable, Network, missing
from tests.rl.conftest import blank, tokenizer

__all__ = ["blank", "tokenizer"]

collect_ignore_glob = [] if missing() is None else ["test_*.py"]


@pytest.fixture
def cable() -> Iterator[Cable]:
    """Join two hosts, which are gone after the test."""
    with Network() as network:
        yield network.join(network.host(), network.host())
