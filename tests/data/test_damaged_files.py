"""Damaged files of rows: thousands of mutations per format are read as text that changed, or refused in one line."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from archon.data.sources import read_rows
from archon.schema.errors import DatasetError

ROWS = [{"prompt": f"{n}+1=", "response": str(n + 1), "number": n, "parts": [{"text": "x" * n}]} for n in range(12)]


def write(path: Path) -> bytes:
    """Write the rows in the format of a file's suffix."""
    table, lines = pa.Table.from_pylist(ROWS), "".join(json.dumps(row) + "\n" for row in ROWS)
    match path.name.partition(".")[2]:
        case "parquet":
            parquet.write_table(table, path, write_page_checksum=True, compression="none")
        case "stream.arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
                for start in range(0, len(ROWS), 3):
                    out.write_table(table.slice(start, 3))
        case "lz4.arrow":
            feather.write_feather(table, str(path), compression="lz4")
        case "arrow":
            feather.write_feather(table, str(path), compression="uncompressed")
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case "jsonl.zst":
            with pa.CompressedOutputStream(str(path), "zstd") as file:
                file.write(lines.encode())
        case "csv":
            path.write_text("a,b\n" + "".join(f'{row["number"]},"x {row["prompt"]}"\n' for row in ROWS))
        case "json":
            path.write_text(json.dumps(ROWS, indent=1))
        case _:
            path.write_text(lines)
    return path.read_bytes()


SUFFIXES = ["parquet", "arrow", "lz4.arrow", "stream.arrow", "jsonl.gz", "jsonl.zst", "csv", "json", "jsonl"]


def damaged(content: bytes, random_: random.Random) -> bytes:
    """Return the content cut, with flipped bits, with bytes that are zero, missing, repeated or huge numbers."""
    changed, place = bytearray(content), random_.randrange(len(content))
    match random_.randrange(6):
        case 0:
            del changed[place:]
        case 1:
            for _ in range(random_.randrange(1, 4)):
                changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
        case 2:
            size = random_.randrange(1, 64)
            changed[place : place + size] = bytes(len(changed[place : place + size]))
        case 3:
            del changed[place : place + random_.randrange(1, 40)]
        case 4:
            number = random_.choice([b"\xff" * 8, bytes(8), (2**31 - 1).to_bytes(8, "little"), b"\0" * 5 + b"\1\0\0"])
            changed[place : place + 8] = number
        case 5:
            changed[place:place] = changed[: random_.randrange(1, 50)]
    return bytes(changed)


def check_damage(path: Path, mutations: int, seed: int) -> None:
    content = write(path)
    rows, random_ = [row.data for row in read_rows(path)], random.Random(seed)
    n_refused = 0
    for _ in range(mutations):
        path.write_bytes(damaged(content, random_))
        try:
            read = [row.data for row in read_rows(path)]
        except DatasetError as error:
            text = str(error)
            assert str(path) in text and "\n" not in text and len(text) < 800
            n_refused += 1
        else:
            assert read == rows or not path.name.endswith(".gz"), "gzip has a checksum, so that no damage may pass"
    assert n_refused > mutations // 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damage_is_refused_in_one_line(tmp_path, suffix):
    check_damage(tmp_path / f"rows.{suffix}", mutations=60, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_thousands_of_kinds_of_damage_are_refused_in_one_line(tmp_path, suffix):
    check_damage(tmp_path / f"rows.{suffix}", mutations=3000, seed=1)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "stream.arrow", "jsonl.gz", "jsonl.zst"])
def test_no_cut_of_a_file_goes_unseen(tmp_path, suffix):
    content = write(file := tmp_path / f"rows.{suffix}")
    for size in [*range(0, len(content), 7), len(content) - 8, len(content) - 1]:
        file.write_bytes(content[:size])
        with pytest.raises(DatasetError, match=f"rows.{suffix}"):
            read_rows(file)
    file.write_bytes(b"PK\3\4" + content[4:])
    with pytest.raises(DatasetError, match=f"rows.{suffix}"):
        read_rows(file)


def test_a_changed_byte_of_a_parquet_page_with_a_checksum_is_refused(tmp_path):
    content = write(file := tmp_path / "rows.parquet")
    place = content.index(b"3+1=")
    file.write_bytes(content[:place] + b"4" + content[place + 1 :])
    with pytest.raises(DatasetError, match="CRC checksum verification failed"):
        read_rows(file)


def test_a_folder_that_datasets_saved_is_checked(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert len(read_rows(tmp_path / "saved")) == len(ROWS)
    random_ = random.Random(0)
    for file in sorted((tmp_path / "saved").iterdir()):
        content = file.read_bytes()
        for change in (content[: len(content) // 2], b"[]", b"", damaged(content, random_)):
            file.write_bytes(change)
            text = ""
            try:
                n_rows = len(read_rows(tmp_path / "saved"))
            except DatasetError as error:
                text = str(error)
            # dataset_info.json is mostly a description: some damage changes nothing.
            assert ("\n" not in text and str(tmp_path) in text) if text else n_rows == len(ROWS)
        file.write_bytes(content)
