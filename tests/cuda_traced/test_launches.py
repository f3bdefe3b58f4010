"""Launches of a block do not exceed the latest rows of the record."""

from __future__ import annotations

import json

import pytest

from benchmarks.record import FOLDER
from tests.cuda_traced.launches import MODELS, rows

pytestmark = pytest.mark.cuda_traced


@pytest.mark.parametrize("model", MODELS)
def test_launches_and_host_waits_are_not_more_than_recorded(model: str) -> None:
    lines = (FOLDER / "launches.jsonl").read_text().splitlines()
    recorded = {(row["model"], row["what"]): row for row in map(json.loads, lines)}
    for row in rows(model):
        latest = recorded[model, row["what"]]
        for figure in ("launches", "host_waits"):
            assert row.get(figure, 0) <= latest.get(figure, 0), row
