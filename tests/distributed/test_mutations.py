"""The gradient matrix is worth something only if it fails: each mistake is made on purpose, and a case finds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case
from tests.distributed.matrix_cases import CASES
from tests.distributed.mutations import MUTATIONS, Mutation, run_mutated
from tests.distributed.verdict import examine

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: f"{each.mistake}, caught by {each.case}")
def test_a_planted_mistake_fails_the_matrix(
    mutation: Mutation, ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    case = {each.name: each for each in CASES}[mutation.case]
    # Unequal numbers, not an error on the ranks: a mistake that stops the run would need no matrix.
    verdict = examine(case, ranks, reference, run_mutated, mutation.mistake)
    assert any(mutation.wrong in name for name in verdict.beyond), sorted(verdict.beyond)
