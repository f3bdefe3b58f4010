"""Large data sets: the same rows from arrays, from several processes and from the cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from archon.data import token_rows
from archon.data.config import TrainingDataConfig
from archon.data.registry import load_rows
from archon.data.token_rows import TokenRows
from archon.schema.errors import DatasetError
from tests.data.toy_tokenizers import CHATML, toy_tokenizer

ROWS = 1300


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARCHON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("archon.data.registry.CACHED_BYTES", 1)
    path = tmp_path / "talks.jsonl"
    talks = [
        {
            "messages": [
                {"role": role, "content": f"{number} {'pears ' * (number % 7)}"} for role in ("user", "assistant")
            ]
        }
        for number in range(ROWS)
    ]
    path.write_text("\n".join(map(json.dumps, talks)), encoding="utf-8")
    return path


def load(file: Path, **options: Any) -> Any:
    return load_rows(TrainingDataConfig(path=str(file), **options), "sft", toy_tokenizer(CHATML))


@pytest.mark.slow
def test_the_rows_of_arrays_and_of_worker_processes_are_those_of_a_list(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_rows, "CHUNK", ROWS)
    plain = load(file)
    assert isinstance(plain.rows, list)
    monkeypatch.setattr(token_rows, "CHUNK", 300)
    arrays = load(file)
    monkeypatch.setattr(token_rows, "_POOL_SECONDS", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    workers = load(file, seed=1)  # the seed has no effect but another place in the cache
    for rows in (arrays.rows, workers.rows):
        assert isinstance(rows, TokenRows) and list(rows) == plain.rows
        assert list(rows[5:9]) == plain.rows[5:9] and rows[-1] == plain.rows[-1]
    longest = max(len(row["input_ids"]) for row in plain.rows)
    shorter = load(file, max_length=longest - 1)
    assert list(shorter.rows) == [row for row in plain.rows if len(row["input_ids"]) < longest]
    assert shorter.n_filtered == ROWS - len(shorter.rows) > 0
    assert list(load(file, limit=7).rows) == plain.rows[:7]


@pytest.mark.slow
def test_bad_rows_of_every_chunk_are_skipped_and_counted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_rows, "CHUNK", 300)
    plain = list(load(file).rows)
    lines = file.read_text().splitlines()
    bad = [*range(300), 700, ROWS - 1]  # all rows of the first chunk
    for number in bad:
        lines[number] = lines[number].replace("assistant", "user")
    file.write_text("\n".join(lines))
    good = [row for number, row in enumerate(plain) if number not in bad]
    with pytest.raises(DatasetError, match=r"talks\.jsonl:1: nothing to train on.*set bad_rows to skip"):
        load(file)
    for seconds in (20.0, 0.0):  # without and with worker processes
        monkeypatch.setattr(token_rows, "_POOL_SECONDS", seconds)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        for _ in ("prepared", "from the cache"):
            dataset = load(file, bad_rows="skip", seed=int(seconds))
            assert list(dataset.rows) == good and dataset.n_skipped == len(bad)


def test_a_second_start_reads_the_cache_unless_data_tokenizer_or_options_changed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = token_rows.encode_rows
    monkeypatch.setattr(
        "archon.data.mapping.encode_rows", lambda source, *rest: encoded.append(len(source)) or encode(source, *rest)
    )
    first = load(file, max_length=40)
    assert list(load(file, max_length=40).rows) == list(first.rows) and encoded == [ROWS]
    moved = file.rename(file.with_name("moved.jsonl"))
    again = load(moved, max_length=40)
    assert again.n_filtered == first.n_filtered and again.source_fingerprint == first.source_fingerprint
    assert encoded == [ROWS]
    load(moved, max_length=41)
    load(moved, max_length=40, system_prompt="Be brief.")
    load_rows(TrainingDataConfig(path=str(moved), max_length=40), "sft", toy_tokenizer(CHATML + "!"))
    moved.write_text(moved.read_text() + "\n" + moved.read_text().splitlines()[0])
    assert len(load(moved, max_length=40).rows) == len(first.rows) + 1
    assert encoded == [ROWS] * 4 + [ROWS + 1]


def test_the_fingerprint_of_a_data_set_is_that_of_earlier_versions_whose_runs_are_resumed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "response": "2"}')
    rows = load_rows(TrainingDataConfig(path=str(path)), "sft", toy_tokenizer())
    assert rows.source_fingerprint == "adf60c5924245fc4"
    skipping = load_rows(TrainingDataConfig(path=str(path), bad_rows="skip"), "sft", toy_tokenizer())
    assert skipping.source_fingerprint != rows.source_fingerprint


def test_a_preparation_that_failed_leaves_nothing(file: Path) -> None:
    file.write_text(file.read_text() + '\n{"messages": 3}')
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(Exception, match=r"talks\.jsonl:1301: 'messages' is 3"):
            load(file)
    assert time.monotonic() - start < 60
    assert not [entry for entry in Path(os.environ["ARCHON_CACHE"], "rows").iterdir() if entry.is_dir()]


def test_files_that_exchange_their_names_are_another_data_set(file: Path) -> None:
    folder = file.parent / "folder"
    folder.mkdir()
    for name, text in (("train.jsonl", "old"), ("train_v2.jsonl", "new")):
        talks = [{"prompt": text, "response": f"{text} {number}"} for number in range(ROWS)]
        (folder / name).write_text("\n".join(map(json.dumps, talks)))
    before = list(load(folder).rows[:3])
    (folder / "train.jsonl").rename(folder / "other.jsonl")
    (folder / "train_v2.jsonl").rename(folder / "train.jsonl")
    assert list(load(folder).rows[:3]) != before


def test_a_damaged_or_unwritable_cache_costs_a_warning(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = list(load(file).rows)
    (cached,) = Path(os.environ["ARCHON_CACHE"], "rows").glob("*/input_ids.npy")
    cached.write_bytes(cached.read_bytes()[:-64])
    assert list(load(file).rows) == rows and caplog.text.count("are damaged and are prepared again") == 1
    assert list(load(file).rows) == rows and caplog.text.count("are damaged and are prepared again") == 1
    monkeypatch.setenv("ARCHON_CACHE", str(file))
    assert list(load(file).rows) == rows and "set ARCHON_CACHE to a folder that can be written" in caplog.text
