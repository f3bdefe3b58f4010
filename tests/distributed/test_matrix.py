"""The gradient matrix: every layout computes what one process computes."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from archon.check.rank_pool import Pool
from tests.distributed.cases import Case
from tests.distributed.matrix_cases import BLOCKS, CASES, FURTHER, PAIRED, QUICK
from tests.distributed.verdict import examine

pytestmark = pytest.mark.xdist_group("ranks")

SAMPLE = int(os.environ.get("ARCHON_MATRIX_SAMPLE", "1"))
"""Of how many further cases one is run; which, the commit says. `make test-matrix` runs all."""


def sampled(cases: Sequence[Case], sample: int) -> list[Case]:
    """The cases of this commit's sample: over `sample` commits about each of them."""
    if sample == 1:
        return [*cases]
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent)
    return [case for case in cases if zlib.crc32(commit + case.name.encode()) % sample == 0]


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
@pytest.mark.parametrize("case", sampled(FURTHER + PAIRED + BLOCKS, SAMPLE), ids=lambda case: case.name)
def test_further_layout_computes_what_one_process_computes(
    case: Case, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    check(case, ranks, reference)


def test_a_sample_is_the_same_for_every_process_that_collects_it() -> None:
    cases = sampled(CASES, 3)
    assert cases == sampled(CASES, 3) and len(CASES) / 6 < len(cases) < len(CASES) / 2


def test_there_are_as_many_cases_as_claimed() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
