"""Rows from JSONL, parquet and Hugging Face sets; what is wrong with a file is one line that names file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
import pytest

from archon.data import data_folder, read_rows
from archon.schema.errors import DatasetError

ROWS = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}]


def test_jsonl_rows_know_their_line(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('\ufeff{"q": "1+1", "a": "2"}\n\n{"q": "2+2", "a": "4"}\n', encoding="utf-8")
    rows = read_rows(file)
    assert [row.data for row in rows] == ROWS
    assert [row.where for row in rows] == [f"{file}:1", f"{file}:3"]
    assert read_rows(tmp_path, "train") == rows


def test_parquet_and_hugging_face_folders_hold_the_same_rows(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "one.parquet"))
    (tmp_path / "folder").mkdir()
    table.to_parquet(str(tmp_path / "folder" / "test.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "splits"))
    for path in ("one.parquet", "folder", "saved", "splits"):
        rows = read_rows(tmp_path / path, "test")
        assert [row.data for row in rows] == ROWS, path
        assert rows[1].where.endswith("row 1")
    with pytest.raises(DatasetError, match=r"no split 'dev' in .*splits: expected one of test"):
        read_rows(tmp_path / "splits", "dev")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"q": 1}\n{"q": \n', r"train\.jsonl:2: not JSON: Expecting value at column \d+; expected one object"),
        (b'{"q": 1}\n\nhello\n', r"train\.jsonl:3: not JSON"),
        (b'{"q": 1}\n[1, 2]\n', r"train\.jsonl:2: expected a JSON object \{…\}, got list"),
        (b'{"q": 1}\n"\xff"\n', r"train\.jsonl:2: not UTF-8: invalid start byte at byte 1"),
        (b"", r"train\.jsonl \(split train\) is empty"),
        (b"\n\n", r"train\.jsonl \(split train\) is empty"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(content)
    with pytest.raises(DatasetError, match=message) as caught:
        read_rows(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("q,a\n")
    (tmp_path / "rows.parquet").write_text("q,a\n")
    (tmp_path / "empty").mkdir()
    for path, message in [
        ("rows.csv", "expected a .jsonl or .parquet file, got suffix '.csv'"),
        ("rows.parquet", "rows.parquet: not a parquet file"),
        ("empty", "no split 'train' in .*: expected train.jsonl or train.parquet, found nothing"),
        ("missing.jsonl", "no dataset at .*missing.jsonl: expected"),
        ("missing", "no dataset at .*missing: expected"),
    ]:
        with pytest.raises(DatasetError, match=message):
            read_rows(tmp_path / path)


def test_a_relative_path_that_is_missing_is_not_looked_up_on_the_hub() -> None:
    with pytest.raises(DatasetError, match=r"no dataset at data/train.jsonl"):
        read_rows("data/train.jsonl")


def test_a_hub_name_is_loaded_by_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, subset: str | None, split: str) -> datasets.Dataset:
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read_rows("openai/gsm8k", "test", "main")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert [row.data for row in rows] == ROWS
    assert rows[0].where == "openai/gsm8k[test] row 0"


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, subset: str | None, split: str) -> datasets.Dataset:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DatasetError, match=r"cannot load owner/name \(split train\): .* from the hub: offline"):
        read_rows("owner/name")


@pytest.mark.parametrize(("module", "path"), [("datasets", "owner/name"), ("pyarrow", "rows.parquet")])
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, path: str
) -> None:
    (tmp_path / "rows.parquet").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DatasetError, match=rf"needs the package {module}.*pip install 'archon-engine\[rl\]'"):
        read_rows(path)


def test_the_data_folder_is_the_path_given_then_the_environments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "env" / "gsm8k").mkdir(parents=True)
    monkeypatch.setenv("ARCHON_DATA", str(tmp_path / "env"))
    assert data_folder("gsm8k", tmp_path / "mine") == tmp_path / "mine"
    assert data_folder("gsm8k") == tmp_path / "env" / "gsm8k"
    with pytest.raises(
        DatasetError, match=r"dataset torl is not at .*env/torl: pass its folder as data_dir, or set ARCHON_DATA"
    ):
        data_folder("torl")
    monkeypatch.delenv("ARCHON_DATA")
    with pytest.raises(DatasetError, match=r"dataset torl is not at .*shared/data/torl"):
        data_folder("torl")


@pytest.mark.parametrize(
    "line", ['{"q": ' + "9" * 5000 + "}", "[" * 100_000], ids=["endless number", "endless nesting"]
)
def test_a_line_that_json_cannot_hold_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"q": "1+1", "a": "2"}\n' + line + "\n")
    with pytest.raises(DatasetError, match=r"train\.jsonl:2: not JSON that can be read"):
        read_rows(file)
