"""What policies, critics and models of preferences are trained by is the same on two data-parallel ranks as on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.distributed.runs import make_inputs
from tests.rl.objectives import (
    OBJECTIVES,
    PREFERENCES,
    assert_same,
    of_every_objective,
    of_every_preference,
    write_pairs,
)

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    make_inputs(folder)
    write_pairs(folder)
    return folder


def test_loss_and_gradients_do_not_change_with_the_data_parallel_size(
    folder: Path, ranks: Callable[[int], Pool]
) -> None:
    """Nine answers: the ranks differ in documents, tokens and micro-batches."""
    path = str(folder / "blank")
    expected = of_every_objective(path, "d1")
    for found in ranks(2).run(of_every_objective, path, "d2"):
        assert found.keys() == OBJECTIVES.keys()
        for name, one in found.items():
            assert_same(one, expected[name])


def test_loss_and_gradients_of_pairs_do_not_change_with_the_data_parallel_size(
    folder: Path, ranks: Callable[[int], Pool]
) -> None:
    path = str(folder / "blank")
    expected = of_every_preference(path, str(folder), "d1")
    for found in ranks(2).run(of_every_preference, path, str(folder), "d2"):
        assert found.keys() == set(PREFERENCES)
        for name, one in found.items():
            assert_same(one, expected[name])
