"""What policies, critics and models of preferences are trained by is the same on two data-parallel ranks as on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from archon.tools.check.rank_pool import Pool
from tests.distributed.runs import make_inputs
from tests.rl.objectives import (
    OBJECTIVES,
    PREFERENCES,
    Found,
    assert_same,
    float64_engine,
    of_environments_in,
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


@pytest.mark.slow
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


def test_loss_of_several_environments_does_not_change_with_the_data_parallel_size(
    folder: Path, ranks: Callable[[int], Pool]
) -> None:
    path = str(folder / "blank")
    expected = of_environments_in(path, "d1")
    for found in ranks(2).run(of_environments_in, path, "d2"):
        assert_same(found, expected)


def test_loss_and_gradients_of_pairs_do_not_change_with_the_data_parallel_size(
    folder: Path, ranks: Callable[[int], Pool]
) -> None:
    path = str(folder / "blank")
    expected = of_every_preference(path, str(folder), "d1")
    for found in ranks(2).run(of_every_preference, path, str(folder), "d2"):
        assert found.keys() == set(PREFERENCES)
        for name, one in found.items():
            assert_same(one, expected[name])


def at_own_temperatures(path: str, layout: str) -> tuple[dict[str, float], Found]:
    """An update with a reference, on answers whose tokens were sampled at temperatures of their own; 0 is the run's."""
    rows = trajectories()
    n, size = rows["loss_mask"].shape
    column = 0.5 + 0.1 * torch.arange(n).unsqueeze(1) + 0.05 * torch.arange(size)
    column[:, ::3] = 0.0
    engine = float64_engine(path, layout=layout)
    return of_objective(engine, engine, rows | {"temperatures": column * rows["loss_mask"]}, {})


@pytest.mark.parametrize("layout", ["t2", "c2", "p2"])
def test_tokens_of_their_own_temperatures_in_every_layout(
    layout: str, folder: Path, ranks: Callable[[int], Pool]
) -> None:
    metrics, gradients = at_own_temperatures(str(folder / "blank"), "d1")
    found = ranks(2).run(at_own_temperatures, str(folder / "blank"), layout)
    assert {name for _, own in found for name in own} >= gradients.keys()
    for own_metrics, own in found:  # a pipeline's rank has its part, with a copy of the embedding where it is the head
        shared = gradients.keys() & own.keys()
        assert_same(
            (own_metrics, {name: own[name] for name in shared}), (metrics, {name: gradients[name] for name in shared})
        )


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
