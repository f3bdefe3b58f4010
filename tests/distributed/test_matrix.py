"""The gradient matrix: every layout computes what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from archon.parallel.layout import parse_layout
from tests.distributed.cases import Case
from tests.distributed.matrix import run_case
from tests.distributed.matrix_cases import CASES, FURTHER, QUICK
from tests.distributed.pool import Pool
from tests.tolerances import REORDER_FP32, REORDER_FP64, STEPS_FP64

pytestmark = pytest.mark.xdist_group("ranks")


def check(case: Case, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]) -> None:
    """Loss, norm and every gradient; in float64 also the weights after three clipped steps."""
    folder = reference(case)
    found = ranks(parse_layout(case.layout).world_size).run(run_case, case, str(folder))
    with safe_open(str(folder / "reference.safetensors"), "pt") as file:
        names = set(file.keys())
    assert set().union(*found) == names, "between them the ranks hold every parameter"
    tolerance = REORDER_FP64 if case.dtype == "float64" else REORDER_FP32
    for rank, differences in enumerate(found):
        for name, difference in differences.items():
            if not name.startswith("weight."):
                assert difference <= tolerance, f"rank {rank}, {name}: {difference:.1e} > {tolerance:.0e}"
            elif case.dtype == "float64":
                assert difference <= STEPS_FP64, f"rank {rank}, {name} after the steps: {difference:.1e}"


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_layout_computes_what_one_process_computes(
    case: Case, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    check(case, ranks, reference)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case.name)
def test_further_layout_computes_what_one_process_computes(
    case: Case, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    check(case, ranks, reference)


def test_there_are_as_many_cases_as_claimed() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
