"""Pools of rank processes and reference results, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case
from tests.distributed.matrix import reference_key, run_reference


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """A pool of as many ranks; it stays for the tests that follow."""
    pools: dict[int, Pool] = {}
    yield lambda size: pools.setdefault(size, Pool(size))
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """The folder of what one process finds for a case; made once for all layouts of a model."""
    folders: dict[tuple[object, ...], Path] = {}

    def find(case: Case) -> Path:
        key = reference_key(case)
        if key not in folders:
            folder = tmp_path_factory.mktemp("reference")
            run_reference(case, folder)
            folders[key] = folder
        return folders[key]

    return find
