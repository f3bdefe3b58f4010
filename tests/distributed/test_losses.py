"""What policies, critics and models of preferences are trained by is the same on two data-parallel ranks as on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from archon.check.rank_pool import Pool
from tests.distributed.runs import make_inputs
from tests.rl.objectives import (
    OBJECTIVES,
    PREFERENCES,
    Found,
    assert_same,
    float64_engine,
    of_every_objective,
    of_every_preference,
    of_objective,
    of_preference,
    trajectories,
    write_pairs,
)

pytestmark = pytest.mark.xdist_group("ranks")

ONE_DOCUMENT = 12
"""Tokens of about one document: nine of them make the ranks' micro-batches unequal in number."""
HANG_SECONDS = 60.0
"""A case takes some seconds."""


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


def score_with_few_tokens(path: str, pairs: str, layout: str) -> tuple[float, list[tuple[dict[str, float], Found]]]:
    """This rank's micro-batches, and what an update with reference and critic finds, and one step on pairs."""
    options = {"layout": layout, "max_tokens_per_mb": ONE_DOCUMENT}
    engine, critic = float64_engine(path, **options), float64_engine(path, is_critic=True, **options)
    policy = of_objective(engine, critic, trajectories(), {"advantage": "gae", "correction": "sequence_tis"})
    pair = of_preference(path, pairs, "dpo", layout, ONE_DOCUMENT)
    return policy[0]["micro_batches"], [policy, pair]


def test_scoring_with_unequal_numbers_of_micro_batches(folder: Path, ranks: Callable[[int], Pool]) -> None:
    """Reference, critic and the policy itself score before the update, each rank its documents."""
    path = str(folder / "blank")
    expected = score_with_few_tokens(path, str(folder), "d1")[1]
    found = ranks(2).run(score_with_few_tokens, path, str(folder), "d2", timeout=HANG_SECONDS)
    assert len({count for count, _ in found}) == 2, "the ranks must differ in their micro-batches"
    for _, results in found:
        for one, other in zip(results, expected, strict=True):
            assert_same(one, other)
