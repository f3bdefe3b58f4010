"""Rows that keep what their source says, for workflows that read it themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archon.rl import get_custom_dataset
from archon.schema.errors import DatasetError

KEYS = {"prompt_key": "question", "response_key": "answer"}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_raw_row_holds_the_sources_own_beside_archons(tmp_path: Path) -> None:
    own = {"question": "1+1=", "answer": 2, "tags": ["easy"]}
    (row,) = get_custom_dataset(write(tmp_path / "a.jsonl", own), raw=True, **KEYS)
    assert row["raw_task"] == own
    assert row["messages"] == [{"role": "user", "content": "1+1="}] and row["answer"] == "2"
    (plain,) = get_custom_dataset(write(tmp_path / "a.jsonl", own), **KEYS)
    assert plain == {key: value for key, value in row.items() if key != "raw_task"}


def test_a_raw_row_needs_neither_prompt_nor_answer(tmp_path: Path) -> None:
    own = [{"game": "a.z8"}, {"game": "b.z8"}]
    assert [row["raw_task"] for row in get_custom_dataset(write(tmp_path / "g.jsonl", *own), raw=True)] == own


def test_a_named_sets_raw_rows_are_archons() -> None:
    row = get_custom_dataset("arithmetic", raw=True)[0]
    assert row["raw_task"] == get_custom_dataset("arithmetic")[0]


def test_only_rl_rows_are_raw(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="raw is true, but the rows are of kind 'dpo'"):
        get_custom_dataset(write(tmp_path / "a.jsonl", {"chosen": "a"}), kind="dpo", tokenizer=object(), raw=True)
