"""`RowDataset` against Hugging Face's datasets: the same operations give the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pytest

from archon.data import RowDataset
from archon.schema.errors import DatasetError

ROWS = [{"q": f"{i}+1=", "a": str(i + 1), "n": i, "parts": [i]} for i in range(5)]


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


def changes_in_place(row: dict[str, Any]) -> dict[str, Any]:
    row["length"] = len(row["q"])
    row["parts"].append(7)
    return row


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "map": lambda rows: rows.map(lambda row: {"messages": [{"role": "user", "content": row["q"]}]}),
    "map over a column": lambda rows: rows.map(lambda row: {"a": row["a"] + "!"}),
    "map with numbers": lambda rows: rows.map(lambda row, i: {"twice": 2 * i + row["n"]}, with_indices=True),
    "map in place": lambda rows: rows.map(changes_in_place),
    "map in place, columns removed": lambda rows: rows.map(changes_in_place, remove_columns=["q", "n"]),
    "map, a removed column given again": lambda rows: rows.map(lambda row: {"a": row["q"]}, remove_columns=["q", "a"]),
    "map to nothing": lambda rows: rows.map(lambda row: None),
    "map, tuned": lambda rows: rows.map(lambda row: {"z": 1}, num_proc=None, desc="z", load_from_cache_file=False),
    "filter": lambda rows: rows.filter(lambda row: row["n"] % 2),
    "filter by number": lambda rows: rows.filter(lambda row, i: i > 2, with_indices=True),
    "remove": lambda rows: rows.remove_columns(["q", "n"]),
    "remove one": lambda rows: rows.remove_columns("q"),
    "rename": lambda rows: rows.rename_column("a", "answer"),
    "select": lambda rows: rows.select(range(1, 3)),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_rows_are_those_of_hugging_face(operation: Callable[[Any], Any]) -> None:
    own = RowDataset("own", [dict(row, parts=[*row["parts"]]) for row in ROWS])
    found, expected = operation(own), operation(datasets.Dataset.from_list(ROWS))
    assert found.column_names == expected.column_names
    assert list(found) == list(expected)
    assert own.rows == ROWS  # unchanged
    assert len(found) == len(expected) and found[0] == expected[0]
    name = found.column_names[0]
    assert found[name] == list(expected[name])


def test_shuffling_keeps_every_row_and_repeats_itself() -> None:
    own = RowDataset("own", ROWS)
    assert sorted(own.shuffle(seed=1), key=lambda row: row["n"]) == ROWS != own.shuffle(seed=1).rows
    assert own.shuffle(seed=1).rows == own.shuffle(seed=1).rows != own.shuffle(seed=2).rows


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda rows: rows.map(lambda row: 3),
            "map returned a int for row 0, expected a dictionary of columns, or None",
        ),
        (
            lambda rows: rows.map(lambda row: None, batched=True),
            r"own.map has no option 'batched'; .*Dataset.from_list",
        ),
        (lambda rows: rows.remove_columns("z"), "own has no column 'z'; it has q, a, n, parts"),
        (lambda rows: rows.rename_column("q", "a"), "has a column 'a' already"),
        (lambda rows: rows["z"], "own has no column 'z'"),
    ],
)
def test_what_cannot_be_done_is_named(wrong: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        wrong(RowDataset("own", ROWS))
