"""Datasets with names of their own: registered, or of another package's entry point."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from archon.data import (
    VALID_DATASETS,
    get_custom_dataset,
    get_gsm8k_rl_dataset,
    get_gsm8k_sft_dataset,
    register_dataset,
    registry,
)
from archon.schema.errors import ConfigError, DatasetError
from tests.data.toy_tokenizers import CHATML, toy_tokenizer

GSM8K = [{"question": f"What is {i}+1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(3)]


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry._NAMED, "_objects", dict(registry._NAMED._objects))
    return


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    return tmp_path


def test_loaders_are_called_as_guides_call_them(gsm8k: Path) -> None:
    """By position, by keyword, and with a Hugging Face dataset's methods on the result."""
    tokenizer = toy_tokenizer(CHATML)
    rows = get_gsm8k_rl_dataset(gsm8k, split="train", tokenizer=tokenizer)
    assert {"messages", "answer"} <= set(rows.column_names) and len(rows) == 3
    assert get_gsm8k_rl_dataset(str(gsm8k), "train", tokenizer, 500).rows == rows.rows
    assert get_gsm8k_rl_dataset(path=gsm8k / "train.jsonl", split="train", tokenizer=tokenizer).rows == rows.rows
    sft = get_gsm8k_sft_dataset(gsm8k, "train", tokenizer)
    assert sft.column_names == ["input_ids", "loss_mask"]
    longest = max(map(len, sft["input_ids"]))
    assert len(sft.filter(lambda row: len(row["input_ids"]) < longest)) < len(sft) == 3


def load_pairs(path: str, split: str, tokenizer: Any, max_length: int | None = None) -> Any:
    """A loader as guides write it, on a Hugging Face dataset."""
    rows = datasets.Dataset.from_list([{"question": f"{split} {i}", "answer": str(i)} for i in range(4)])

    def process(sample: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": sample["question"]}]}

    rows = rows.map(process).remove_columns(["question"])
    return rows if max_length is None else rows.filter(lambda row: len(row["messages"][0]["content"]) <= max_length)


def test_a_registered_loader_is_found_by_its_name() -> None:
    assert "pairs" not in VALID_DATASETS
    assert register_dataset("pairs", "rl")(load_pairs) is load_pairs
    assert "pairs" in VALID_DATASETS and register_dataset("pairs", "rl")(load_pairs)  # once more is no conflict
    rows = get_custom_dataset("pairs", split="test")
    assert rows.column_names == ["answer", "messages"] and rows[3]["messages"][0]["content"] == "test 3"
    assert len(get_custom_dataset("pairs", split="test", max_length=6)) == 4
    with pytest.raises(DatasetError, match=r"dataset pairs\[test\] returned no row"):
        get_custom_dataset("pairs", split="test", max_length=5)
    with pytest.raises(DatasetError, match="pairs has no rows of kind 'sft'; expected rl"):
        get_custom_dataset("pairs", kind="sft", tokenizer=object())
    with pytest.raises(DatasetError, match=r"instruction is 'x', but the loader of .* has no such argument"):
        get_custom_dataset("pairs", instruction="x")
    with pytest.raises(DatasetError, match=r"dataset 'pairs' has a loader of rl rows already: .*load_pairs"):
        register_dataset("pairs", "rl")(lambda path: [])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "loss_mask": [0]}, "row 0: 2 input_ids but 1 values of loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask must be 1 on trained tokens"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "at least one"),
        ({"input_ids": [1, 2]}, "row 0: no key 'loss_mask'"),
        (None, "returned no row"),
    ],
)
def test_encoded_rows_that_cannot_be_trained_are_named(row: Any, message: str) -> None:
    register_dataset("encoded", "sft")(lambda path, split, tokenizer: [row] if row else [])
    with pytest.raises(DatasetError, match=message):
        get_custom_dataset("encoded", kind="sft", tokenizer=object())


def test_a_packages_entry_point_gives_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_data.py").write_text(
        "def load(split):\n    return [{'messages': [], 'answer': split}]\nSETS = {'rl': load}\n"
    )
    info = tmp_path / "sums_data-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sums-data\nVersion: 1.0\n")
    entry = "[archon.datasets]\nsums_of_a_package = sums_data:SETS\nbroken = sums_data:NOTHING\n"
    (info / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    assert "sums_of_a_package" in VALID_DATASETS and "sums_data" not in sys.modules
    assert get_custom_dataset("sums_of_a_package", split="test")[0]["answer"] == "test"
    with pytest.raises(
        ConfigError, match=r"the dataset 'broken' of package sums-data .* cannot be loaded: AttributeError"
    ):
        get_custom_dataset("broken")
