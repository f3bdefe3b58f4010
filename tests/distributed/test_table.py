"""The tables of parallel/README.md list the cases there are and say what the record says."""

from __future__ import annotations

from tests.distributed.matrix_cases import CASES
from tests.distributed.table import README, read_record, with_tables


def test_the_page_lists_every_case_with_what_the_record_says() -> None:
    page = README.read_text(encoding="utf-8")
    assert with_tables(page, read_record()) == page, "run python -m tests.distributed.table"


def test_the_record_speaks_of_no_case_that_is_gone() -> None:
    assert read_record().keys() <= {case.name for case in CASES}
