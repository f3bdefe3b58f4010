"""The tables of parallel/README.md list the cases there are and say what the record says, which is of these cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.cases import MODELS
from tests.distributed.matrix_cases import CASES
from tests.distributed.record import is_current
from tests.distributed.table import README, read_record, with_tables


def test_the_page_lists_every_case_with_what_the_record_says() -> None:
    page = README.read_text(encoding="utf-8")
    assert with_tables(page, read_record()) == page, "run python -m tests.distributed.table"


def test_the_record_speaks_of_no_case_that_is_gone_or_has_changed() -> None:
    record = read_record()
    assert record.keys() <= {case.name for case in CASES}
    stale = [case.name for case in CASES if case.name in record and not is_current(case, record)]
    assert stale == [], "run python -m tests.distributed.record --missing"


def test_a_case_is_recorded_anew_where_its_model_or_an_option_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    record: dict[str, dict[str, Any]] = {case.name: {"definition": case.definition}}
    assert is_current(case, record)
    assert not is_current(replace(case, config={"cpu_offload": True}), record)
    assert case.definition != replace(case, layout="d4").definition
    monkeypatch.setitem(MODELS, case.model, MODELS[case.model] | {"head_dim": 12})
    assert not is_current(case, record)
    assert not is_current(case, {})
