"""Reader of rows and their locations: JSONL and parquet files, folders, Hugging Face datasets, functions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from archon.schema.errors import DatasetError
from archon.schema.lazy import import_dotted

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FUNCTION = "python:"
_NEEDS_EXTRA = "is not installed; install archon's extra `rl`: pip install 'archon-engine[rl]'"


class SourceRow(NamedTuple):
    """A row of a source, and its location (`file.jsonl:12`), for error messages."""

    where: str
    data: dict[str, Any]


def read_rows(path: str | Path, split: str = "train", subset: str | None = None) -> list[SourceRow]:
    """Return all rows of one split.

    Args:
        path: a `.jsonl` or `.parquet` file; a directory with `<split>.jsonl` or `<split>.parquet`, or one saved by
            `datasets`; the name of a dataset on the Hugging Face hub, `owner/name`; or `python:` and the dotted path of
            a function that returns the rows of a split as dictionaries.
        split: split of a source with several. A file is one split, whatever its name.
        subset: configuration of a hub dataset with several.

    Raises:
        DatasetError: missing, empty or malformed data; names the file and the line.
    """
    location = Path(path).expanduser()
    if str(path).startswith(_FUNCTION):
        rows = _call_function(str(path), split)
    elif location.is_file():
        rows = _read_file(location)
    elif location.is_dir():
        rows = _read_folder(location, split)
    elif _HUB_NAME.fullmatch(str(path)) and location.suffix not in (".jsonl", ".json", ".parquet"):
        rows = _read_hub(str(path), split, subset)
    else:
        raise DatasetError(
            f"no dataset at {path}: expected a .jsonl or .parquet file, a folder, a hub name owner/name, or "
            f"{_FUNCTION}package.module.function"
        )
    if not rows:
        raise DatasetError(f"dataset {path} (split {split}) is empty: expected at least one row")
    return rows


def data_folder(name: str, explicit: str | Path | None = None) -> Path:
    """Return the folder of a named dataset: `explicit`, `$ARCHON_DATA/<name>`, or `../shared/data/<name>`.

    The last is relative to the checkout, and is used if the other two are not set.

    Raises:
        DatasetError: the folder does not exist.
    """
    if explicit is not None:
        folder = Path(explicit).expanduser()
    elif os.environ.get("ARCHON_DATA"):
        folder = Path(os.environ["ARCHON_DATA"]).expanduser() / name
    else:
        folder = Path(__file__).resolve().parents[3] / "shared" / "data" / name
    if folder.is_dir():
        return folder
    raise DatasetError(
        f"dataset {name} is not at {folder}: pass its folder as data_dir, or set ARCHON_DATA to the folder that holds "
        f"{name}/"
    )


def _call_function(path: str, split: str) -> list[SourceRow]:
    """Return the rows of a user's function; exceptions that it raises are not caught."""
    function = import_dotted(path.removeprefix(_FUNCTION), "dataset function")
    returned = function(split) if callable(function) else None
    if not isinstance(returned, Iterable):
        raise DatasetError(f"{path}: expected a function that returns the rows of a split, as dictionaries")
    rows = []
    for number, row in enumerate(returned, start=1):
        if not isinstance(row, dict):
            raise DatasetError(f"{path}: row {number} is a {type(row).__name__}, expected a dictionary")
        rows.append(SourceRow(f"{path}:{number}", row))
    return rows


def _read_file(path: Path) -> list[SourceRow]:
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DatasetError(f"cannot read {path}: expected a .jsonl or .parquet file, got suffix {path.suffix!r}")


def _read_jsonl(path: Path) -> list[SourceRow]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise DatasetError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
            except json.JSONDecodeError as error:
                raise DatasetError(
                    f"{where}: not JSON: {error.msg} at column {error.colno}; expected one object"
                ) from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
                raise DatasetError(f"{where}: not JSON that can be read: {error}") from error
            if not isinstance(row, dict):
                raise DatasetError(f"{where}: expected a JSON object {{…}}, got {type(row).__name__}")
            rows.append(SourceRow(where, row))
    return rows


def _read_parquet(path: Path) -> list[SourceRow]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise DatasetError(f"{path} needs the package pyarrow, which {_NEEDS_EXTRA}") from error
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path}: not a parquet file: {error}") from error
    return [SourceRow(f"{path} row {number}", row) for number, row in enumerate(table.to_pylist())]


def _read_folder(folder: Path, split: str) -> list[SourceRow]:
    for suffix in (".jsonl", ".parquet"):
        file = folder / f"{split}{suffix}"
        if file.is_file():
            return _read_file(file)
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        library = _import_datasets(folder)
        return _from_hugging_face(library.load_from_disk(str(folder)), str(folder), split)
    present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise DatasetError(f"no split {split!r} in {folder}: expected {split}.jsonl or {split}.parquet, found {present}")


def _read_hub(name: str, split: str, subset: str | None) -> list[SourceRow]:
    library = _import_datasets(name)
    try:
        loaded = library.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DatasetError(
            f"cannot load {name} (split {split}): there is no such file or folder, and from the hub: {error}"
        ) from error
    return _from_hugging_face(loaded, name, split)


def _from_hugging_face(loaded: Any, name: str, split: str) -> list[SourceRow]:
    if hasattr(loaded, "keys"):
        if split not in loaded:
            raise DatasetError(f"no split {split!r} in {name}: expected one of {', '.join(loaded)}")
        loaded = loaded[split]
    return [SourceRow(f"{name}[{split}] row {number}", dict(row)) for number, row in enumerate(loaded)]


def _import_datasets(source: object) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(f"{source} needs the package datasets, which {_NEEDS_EXTRA}") from error
    return datasets
