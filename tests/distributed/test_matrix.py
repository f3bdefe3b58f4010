"""The gradient matrix: every layout computes what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case
from tests.distributed.matrix_cases import BLOCKS, CASES, FURTHER, PAIRED, QUICK
from tests.distributed.verdict import examine

pytestmark = pytest.mark.xdist_group("ranks")


def check(case: Case, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]) -> None:
    """Loss, norm and every gradient; in float64 also the weights after three clipped steps."""
    verdict = examine(case, ranks, reference)
    assert verdict.beyond == {}


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_layout_computes_what_one_process_computes(
    case: Case, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    check(case, ranks, reference)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER + PAIRED + BLOCKS, ids=lambda case: case.name)
def test_further_layout_computes_what_one_process_computes(
    case: Case, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    check(case, ranks, reference)


def test_there_are_as_many_cases_as_claimed() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
