"""Rows from files, folders and Hugging Face sets; an error about a file is one line that names file and line."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from archon.data import data_folder, read_rows, sources
from archon.data.mapping import require_column
from archon.data.sources import SourceRow
from archon.schema.errors import DatasetError

ROWS = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def test_jsonl_rows_know_their_line(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('\ufeff{"q": "1+1", "a": "2"}\n\n{"q": "2+2", "a": "4"}\n', encoding="utf-8")
    rows = read_rows(file)
    assert [row.data for row in rows] == ROWS
    assert [row.where for row in rows] == [f"{file}:1", f"{file}:3"]
    assert read_rows(tmp_path, "train") == rows


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows in the format of a file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = ["q,a", *(f"{row['q']},{row['a']}" for row in rows)]
    match path.name.lower().partition(".")[2]:
        case "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
        case "stream.arrow":
            with (
                pa.OSFile(str(path), "wb") as file,
                pa.ipc.new_stream(file, pa.schema({"q": "string", "a": "string"})) as out,
            ):
                out.write_table(pa.Table.from_pylist(rows))
        case "arrow":
            feather.write_feather(pa.Table.from_pylist(rows), str(path), compression="uncompressed")
        case "list.json":
            path.write_text(json.dumps(rows, indent=2))
        case "csv":
            path.write_text("\ufeff" + "\r\n".join(table) + "\r\n", encoding="utf-8", newline="")
        case "csv.gz":
            path.write_bytes(gzip.compress("\n".join(table).encode()))
        case "jsonl.gz" | "json.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case "jsonl.zst":
            with pa.CompressedOutputStream(str(path), "zstd") as file:
                file.write(lines.encode())
        case "jsonl" | "json" | "ndjson":
            path.write_text(lines)


@pytest.mark.parametrize(
    "suffix",
    [
        "jsonl",
        "json",
        "list.json",
        "JSONL",
        "csv",
        "parquet",
        "arrow",
        "stream.arrow",
        "jsonl.gz",
        "json.GZ",
        "csv.gz",
        "jsonl.zst",
        "ndjson",
    ],
)
def test_every_format_holds_the_same_rows(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"x.{suffix}"
    _write(file, ROWS)
    rows = read_rows(file)
    assert [row.data for row in rows] == ROWS
    assert all(str(file) in row.where for row in rows)


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (["hub/README.md", "hub/data/train-00000-of-00002.parquet", "hub/data/train-00001-of-00002.parquet"], "hub"),
        (["flat/train-00000-of-00002.parquet", "flat/train-00001-of-00002.parquet", "flat/test-0.parquet"], "flat"),
        (["shards/part-0.jsonl", "shards/part-1.jsonl"], "shards"),
        (["a/x.jsonl.gz", "a/y.jsonl.gz", "a/notes.md"], "a"),
        (["a/x.jsonl", "a/y.jsonl", "a/z.csv"], "a/*.jsonl"),
        (["a/b/x.parquet", "a/c/y.jsonl"], "a/**/*.*"),
        (["folders/train/a.jsonl", "folders/train/b.jsonl", "folders/test/a.jsonl"], "folders"),
    ],
)
def test_several_files_are_read_in_order(tmp_path: Path, names: list[str], path: str) -> None:
    data = [name for name in names if not name.endswith(".md")]
    for name in names:
        _write(tmp_path / name, [ROWS[min(data.index(name), 1)]] if name in data else [])
    assert [row.data for row in read_rows(tmp_path / path)] == ROWS


def test_a_subset_selects_a_configuration_of_a_hub_folder(tmp_path: Path) -> None:
    for number, subset in enumerate(("main", "socratic")):
        _write(tmp_path / subset / "train-00000-of-00001.parquet", [ROWS[number]])
    configs = [
        f"- config_name: {s}\n  data_files:\n  - {{split: train, path: {s}/train-*}}" for s in ("main", "socratic")
    ]
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "\n".join(configs) + "\n---\n")
    assert [row.data for row in read_rows(tmp_path, "train", "socratic")] == ROWS[1:]
    with pytest.raises(DatasetError, match=r"\['main', 'socratic'\]"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("names", "split", "message"),
    [
        (
            ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"],
            "train",
            "2 of the 3 files train-…-of-00003",
        ),
        (["train.jsonl", "train.parquet"], "train", "several files: train.jsonl, train.parquet; set path to one"),
        (["a.jsonl", "a.jsonl.gz", "b.csv"], "train", r"files of several formats: a.jsonl.*, b.csv; .*pattern"),
        (["part-0.jsonl", "part-1.jsonl"], "test", "no split 'test' in .*: expected one of train"),
        (["train-0.jsonl", "dev-0.jsonl"], "test", "expected one of train, validation"),
    ],
)
def test_no_file_of_a_folder_is_dropped_silently(tmp_path: Path, names: list[str], split: str, message: str) -> None:
    for name in names:
        _write(tmp_path / name, ROWS)
    with pytest.raises(DatasetError, match=message):
        read_rows(tmp_path, split)


@pytest.mark.parametrize("suffix", ["jsonl", "list.json", "csv", "parquet", "arrow", "stream.arrow", "jsonl.gz"])
def test_damage_is_one_line_or_changes_text_alone(tmp_path: Path, suffix: str) -> None:
    _write(tmp_path / f"whole.{suffix}", ROWS * 3)
    whole, generator = (tmp_path / f"whole.{suffix}").read_bytes(), random.Random(suffix)
    file, messages = tmp_path / f"damaged.{suffix}", []
    for _ in range(100):
        start = generator.randrange(len(whole))
        inserted = generator.choice([b"", b"\x00", b'"', b"\n", b"[", b"\xff\xfe", generator.randbytes(6)])
        file.write_bytes(whole[:start] + inserted + whole[start + generator.randrange(9) :])
        try:
            rows = read_rows(file)
        except DatasetError as error:
            messages.append(str(error))
        else:
            assert all(isinstance(row.data, dict) for row in rows)
    assert len(messages) > 30
    assert all("\n" not in message and file.name in message for message in messages)


@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_of_lists_holds_splits_or_data(tmp_path: Path, indent: int | None) -> None:
    def read(content: object, split: str = "train") -> list[SourceRow]:
        (tmp_path / "rows.json").write_text(json.dumps(content, indent=indent), encoding="utf-8")
        return read_rows(tmp_path / "rows.json", split)

    assert [row.data for row in read({"version": "1.0", "data": ROWS})] == ROWS
    assert [row.data for row in read({"train": ROWS, "test": ROWS[:1]})] == ROWS
    assert [row.data for row in read({"train": ROWS, "test": ROWS[:1]}, "test")] == ROWS[:1]
    with pytest.raises(DatasetError, match="no split 'validation'; expected one of train, test"):
        read({"train": ROWS, "test": ROWS}, "validation")
    for row in ({"q": "1", "data": ["x"]}, {"messages": [{"role": "user", "content": "x"}]}, {"data": []}):
        assert [source.data for source in read(row)] == [row]


def test_the_only_line_of_a_file_is_one_row(tmp_path: Path) -> None:
    row = {"prompt": "a", "test": [{"input": "1", "output": "2"}], "data": [{"b": 1}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    assert [source.data for source in read_rows(tmp_path / "rows.jsonl")] == [row]


def test_csv_values_are_text_with_commas_quotes_and_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('q,a\n"say ""hi"",\nplease",007\nNA,\n', encoding="utf-8")
    assert [row.data for row in read_rows(file)] == [{"q": 'say "hi",\nplease', "a": "007"}, {"q": "NA", "a": ""}]


def test_a_dotted_key_names_a_nested_column() -> None:
    row = SourceRow(
        "x:1", {"reward_model": {"ground_truth": "4", "nothing": None}, "a.b": "plain", "a": {"b": "nested"}}
    )
    assert require_column(row, "reward_model.ground_truth") == "4"
    assert require_column(row, "a.b") == "plain"
    for key, message in [
        ("reward_model.truth", "x:1: no key 'reward_model.truth'; 'reward_model' has: 'ground_truth', 'nothing'"),
        ("reward_model.ground_truth.x", "no key .*; 'ground_truth' has: '4'"),
        ("reward_model.nothing", "'reward_model.nothing' is empty"),
        ("missing.x", "the row has: 'reward_model', 'a.b', 'a'"),
    ]:
        with pytest.raises(DatasetError, match=message):
            require_column(row, key)


def test_nan_is_not_an_answer(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "1+1", "a": NaN}')
    with pytest.raises(DatasetError, match=r"rows.jsonl:1: 'a' is NaN"):
        require_column(read_rows(tmp_path / "rows.jsonl")[0], "a")


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
        (b'[{"q": 1},\n{"q": \xff}]\n', r"train\.jsonl:2: not UTF-8: invalid start byte at byte 6"),
        (b'[{"q": 1},\n{"q": 2},\n]\n', r"train\.jsonl:3: not JSON"),
        (b'[{"q": 1}, 2]\n', r"train\.jsonl row 1: expected a JSON object \{…\}, got int"),
        (b'{"q": 1}\n{"q": 1, "q": 2}\n', r"train\.jsonl:2: .*key 'q' is repeated"),
        (LINES.encode("utf-16"), r"train\.jsonl: UTF-16 text; expected UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", r"train\.jsonl: a pointer of Git LFS"),
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
    (tmp_path / "rows.xlsx").write_text("q,a\n")
    (tmp_path / "rows.parquet").write_text("q,a\n")
    (tmp_path / "rows.arrow").write_text("q,a\n")
    (tmp_path / "many.csv").write_text("q,a\n1,2\n1,2,3\n")
    (tmp_path / "twice.csv").write_text("q,q\n1,2\n")
    (tmp_path / "open.csv").write_text('q,a\n1,"2\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(LINES.encode())[:-12])
    (tmp_path / "plain.jsonl.gz").write_text(LINES)
    (tmp_path / "plain.jsonl.zst").write_text(LINES)
    (tmp_path / "rows.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path, message in [
        ("rows.xlsx", r"expected a file \(.jsonl, .*\), got suffix '.xlsx'"),
        ("rows.txt", "got suffix '.txt'; write each document as a line"),
        ("plain.jsonl.zst", "plain.jsonl.zst: damaged or not zstd"),
        ("rows.parquet", "rows.parquet: not a parquet file"),
        ("rows.arrow", "rows.arrow: not an Arrow file"),
        ("many.csv", r"many.csv:3: 3 values for 2 columns \(q, a\)"),
        ("twice.csv", "twice.csv:1: a column name is repeated: q, q"),
        ("open.csv", "open.csv: not CSV in UTF-8 after line 2: unexpected end of data"),
        ("cut.jsonl.gz", "cut.jsonl.gz: damaged"),
        ("plain.jsonl.gz", "plain.jsonl.gz: damaged or not gzip"),
        ("empty", "no split 'train' in .*: expected .* found nothing"),
        ("missing.jsonl", "no dataset at .*missing.jsonl: expected"),
        ("missing", "no dataset at .*missing: expected"),
        ("*.xml", "no dataset at .*xml: expected"),
    ]:
        with pytest.raises(DatasetError, match=message) as caught:
            read_rows(tmp_path / path)
        assert "\n" not in str(caught.value)


def test_a_relative_path_that_is_missing_is_not_looked_up_on_the_hub() -> None:
    with pytest.raises(DatasetError, match=r"no dataset at data/train.jsonl"):
        read_rows("data/train.jsonl")


def test_a_hub_name_is_loaded_by_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, subset: str | None, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((name, subset, split, revision))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "is_reachable", lambda *_: True)
    rows = read_rows("openai/gsm8k", "test", "main")
    assert asked == [("openai/gsm8k", "main", "test", None)]
    assert [row.data for row in rows] == ROWS
    assert rows[0].where == "openai/gsm8k[test] row 0"
    assert [row.data for row in read_rows("openai/gsm8k@v1.0", "test")] == ROWS
    assert asked[1:] == [("openai/gsm8k", None, "test", "v1.0")]


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> datasets.Dataset:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "is_reachable", lambda *_: True)
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
    with pytest.raises(DatasetError, match="dataset torl: its folder is not known; pass its folder as data_dir"):
        data_folder("torl")


@pytest.mark.parametrize(
    "line", ['{"q": ' + "9" * 5000 + "}", "[" * 100_000], ids=["endless number", "endless nesting"]
)
def test_a_line_that_json_cannot_hold_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"q": "1+1", "a": "2"}\n' + line + "\n")
    with pytest.raises(DatasetError, match=r"train\.jsonl:2: not JSON that can be read"):
        read_rows(file)


def test_the_nulls_that_arrow_adds_to_objects_are_dropped(tmp_path: Path) -> None:
    rows = [
        {"calls": [{"name": "weather", "arguments": {"city": "Oslo"}}], "note": None},
        {"calls": [{"name": "add", "arguments": {"a": 1, "b": [None, {"c": 2}]}}], "note": "x"},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for source in ("rows.parquet", "saved"):
        assert [row.data for row in read_rows(tmp_path / source)] == rows
