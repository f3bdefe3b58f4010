"""Recomputation of the first blocks, by `auto` or by hand, gives the results of one process in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case
from tests.distributed.verdict import examine

pytestmark = pytest.mark.xdist_group("ranks")

FIRST = {"mode": "selective", "selective": "first 1"}
OFFLOAD = {"mode": "offload"}
AUTO = {"mode": "auto", "memory_budget": 0.0}  # recomputes every block


@pytest.mark.parametrize(
    ("layout", "model", "policy"),
    [
        ("d2", "dense", AUTO),
        ("p2", "tied", AUTO),
        ("d2", "dense", FIRST),
        ("t2", "dense", FIRST),
        ("c2", "dense", FIRST),
        ("p2", "tied", FIRST),
        ("d2e2", "moe", FIRST),
        ("d2", "dense", OFFLOAD),
        ("t2", "dense", OFFLOAD),
        ("p2", "tied", OFFLOAD),
        ("d2e2", "moe", OFFLOAD),
    ],
)
def test_the_gradients_are_those_of_one_process(
    layout: str,
    model: str,
    policy: dict[str, Any],
    ranks: Callable[[int], Pool],
    reference: Callable[[Case], Path],
) -> None:
    verdict = examine(Case(layout, model, config={"activation_checkpoint": policy}), ranks, reference)
    assert verdict.beyond == {}
