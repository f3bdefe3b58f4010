"""The planner's record and table of published figures say what the planner says now."""

from __future__ import annotations

from benchmarks.plan_check import RECORD, TABLE, WITHIN, lines, records, table


def test_the_record_and_its_table_are_what_the_planner_says_now() -> None:
    rows = records()
    assert RECORD.read_text() == lines(rows)
    assert TABLE.read_text() == table(rows)
    assert all(row["missed"] for row in rows if abs(row["ratio"] - 1) > WITHIN), "a miss without its reason"
