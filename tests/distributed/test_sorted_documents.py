"""The engine has the model compute many short documents by length, in every layout, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.micro_batch import TokenOrder
from archon.tools.check.rank_pool import Pool
from tests.distributed import matrix
from tests.distributed.cases import Case, batch, engine_config
from tests.distributed.verdict import examine

pytestmark = pytest.mark.xdist_group("ranks")

# Two micro-batches: one of documents of 5 with one of 3 among them, one of documents of 2 and 3 in turn.
LENGTHS, ROOM = (2, 5, 3) * 9, {"max_tokens_per_mb": 48}
BIAS = {"router_bias_update_rate": 0.01}
CASES = [
    Case("d1", config=ROOM),
    Case("d1", critic=True, config=ROOM),
    Case("d1", "window", config=ROOM | {"loss": "fused"}),
    Case("t2", config=ROOM | {"loss": "fused"}),
    Case("c2", config=ROOM | {"context_parallel": "ulysses"}),
    Case("c2", config=ROOM | {"context_parallel": "allgather"}),
    Case("p2", config=ROOM),
    Case("p2", "moe", config=ROOM | BIAS),
    Case("c2", "moe", config=ROOM | BIAS | {"context_parallel": "allgather"}),
]


def short_documents(step: int) -> dict[str, Tensor]:
    return batch(LENGTHS, seed=10 + step)


def run_sorted(case: Case, folder: str) -> dict[str, float]:
    """On every rank: the case on short documents, of which some micro-batch was sorted."""
    seen: list[bool] = []
    sort = TokenOrder.by_length

    def noted(documents: PackedBatch) -> TokenOrder:
        order = sort(documents)
        seen.append(order.rows is not None)
        return order

    with (
        mock.patch("tests.distributed.matrix.data_of", short_documents),
        mock.patch.object(TokenOrder, "by_length", noted),
    ):
        differences = matrix.run_case(case, folder)
    assert any(seen)
    return differences


def run_left_in_the_models_order(case: Case, folder: str) -> dict[str, float]:
    """As above, with the mistake of not bringing results back."""
    with mock.patch.object(TokenOrder, "in_pack_order", lambda self, x: x):
        return run_sorted(case, folder)


@pytest.fixture(scope="module")
def unsorted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """What one process finds that computes documents as they come."""
    folders: dict[tuple[object, ...], Path] = {}

    def find(case: Case) -> Path:
        key = matrix.reference_key(case)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("unsorted")
            with (
                mock.patch("tests.distributed.matrix.data_of", short_documents),
                mock.patch.object(TokenOrder, "by_length", TokenOrder.of_pack),
            ):
                matrix.run_reference(case, folders[key])
        return folders[key]

    return find


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_are_those_of_documents_as_they_come(
    case: Case, ranks: Callable[[int], Pool], unsorted: Callable[[Case], Path]
) -> None:
    assert examine(case, ranks, unsorted, run_sorted).beyond == {}


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_results_in_another_order_are_noticed(
    case: Case, ranks: Callable[[int], Pool], unsorted: Callable[[Case], Path]
) -> None:
    assert "loss" in examine(case, ranks, unsorted, run_left_in_the_models_order).beyond


def test_scores_come_back_in_the_order_of_the_batch(unsorted: Callable[[Case], Path]) -> None:
    case = CASES[0]
    engine = ArchonEngine(engine_config(case, f"{unsorted(case)}/checkpoint", "d1"))
    engine.initialize()
    data = short_documents(0)
    assert any(mb.order.rows is not None for mb in engine._split(data)[1])
    together = engine.forward_batch(data)
    for row in range(len(LENGTHS)):
        alone = engine.forward_batch({name: x[row : row + 1] for name, x in data.items()})
        assert (alone[0] - together[row]).abs().max() < 1e-12
