"""The ranks of one start find each other in a store that has what earlier starts left in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from archon.parallel.rendezvous import agree_on_name

LIMIT = timedelta(seconds=20)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)


def start(server: dist.TCPStore, *ranks: int, size: int = 3, limit: timedelta = LIMIT) -> list[str]:
    """The names that ranks agree on, which come in this order."""

    def join(rank: int) -> str:
        own = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=limit)
        return agree_on_name(own, rank, size, limit)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(join, ranks))


def test_ranks_of_a_start_agree_on_a_name_of_their_own(server: dist.TCPStore) -> None:
    names = [start(server, *order) for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1))]
    assert [len(set(name)) for name in names] == [1, 1, 1]
    assert len({name[0] for name in names}) == 3


def test_ranks_that_died_on_their_way_mislead_nobody(server: dist.TCPStore) -> None:
    short = timedelta(seconds=0.3)
    for died in ((1, 2), (1,)):  # without a first rank; their greetings remain
        with pytest.raises(dist.DistStoreError):
            start(server, *died, limit=short)
    with pytest.raises(dist.DistStoreError):
        start(server, 0, limit=short)  # which answered them
    assert len(set(start(server, 0, 1, 2))) == 1
    assert len(set(start(server, 2, 1, 0))) == 1
