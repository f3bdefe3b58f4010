"""Launches of a block do not exceed the latest rows of the record, nor a compiled block its aim."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks.record import FOLDER
from tests.cuda_traced.launches import COMPILED, MODELS, rows

pytestmark = pytest.mark.cuda_traced
MOST_LAUNCHES = 65
"""Launches of a compiled block, forward and backward; one H100 was measured with 131."""


def check_rows(measured: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check rows of one model against the latest ones of the record; return them by what they count."""
    lines = (FOLDER / "launches.jsonl").read_text().splitlines()
    recorded = {(row["model"], row["what"]): row for row in map(json.loads, lines)}
    rows = {row["what"]: row for row in measured}
    for row in rows.values():
        latest = recorded[row["model"], row["what"]]
        for figure in ("launches", "host_waits"):
            assert row.get(figure, 0) <= latest.get(figure, 0), row
    return rows


@pytest.mark.parametrize("model", MODELS)
def test_launches_and_host_waits_are_not_more_than_recorded(model: str) -> None:
    measured = check_rows(rows(model))
    if model == "dense":
        compiled = (f"{COMPILED}: forward", f"{COMPILED}: backward", "block: weights, 1 micro-batch")
        assert sum(measured[what]["launches"] for what in compiled) <= MOST_LAUNCHES
