"""Two hosts, where this machine can make them; elsewhere nothing here is collected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.namespaces import Hosts, can_make_hosts, two_hosts
from tests.rl.conftest import blank, tokenizer

__all__ = ["blank", "tokenizer"]

collect_ignore_glob = [] if can_make_hosts() else ["test_*.py"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made
