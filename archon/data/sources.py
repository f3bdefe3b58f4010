"""Reader of rows and their locations: files (JSON, CSV, parquet, Arrow), folders, hub datasets and functions."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast, overload

from archon.checkpoint.hub import hub_snapshot, is_reachable, parse_hub_id
from archon.schema.errors import DatasetError
from archon.schema.lazy import import_dotted

_FUNCTION = "python:"
_SPLITS = ("train", "validation", "test")
_TABLES = ("data", "rows")  # names of a list of rows in a JSON object
_OBJECT_FILES = (".json", ".json.gz")  # in JSON Lines an object is a row, also if it is the only one
_SHARD = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\..*")
_NEEDS_EXTRA = "is not installed; install archon's extra `rl`: pip install 'archon-engine[rl]'"


class SourceRow(NamedTuple):
    """A row of a source, and its location (`file.jsonl:12`), for error messages."""

    where: str
    data: dict[str, Any]


class JsonLines(Sequence[SourceRow]):
    """Rows of JSON Lines files, parsed when they are read: a parsed conversation takes several times the memory.

    Args:
        lines: file, number and text of each line.
    """

    def __init__(self, lines: Sequence[tuple[Path, int, bytes]]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    @overload
    def __getitem__(self, index: int) -> SourceRow: ...
    @overload
    def __getitem__(self, index: slice) -> JsonLines: ...
    def __getitem__(self, index: int | slice) -> SourceRow | JsonLines:
        """Return a row, or some rows that are not parsed yet."""
        if isinstance(index, slice):
            return JsonLines(self.lines[index])
        path, number, line = self.lines[index]
        return _json_row(_parse_json(line.rstrip(), path, number), f"{path}:{number}")


def read_rows(path: str | Path, split: str = "train", subset: str | None = None) -> list[SourceRow]:
    """Return all rows of one split, see `open_rows`."""
    return list(open_rows(path, split, subset))


def open_rows(path: str | Path, split: str = "train", subset: str | None = None) -> Sequence[SourceRow]:
    """Return the rows of one split. A line of JSON is parsed, and may raise its error, when its row is read.

    Args:
        path: a file (`.jsonl`, `.json`, `.csv`, all three also with `.gz`, `.jsonl.zst`, `.parquet`, `.arrow`); a
            pattern of files (`shards/*.jsonl`); a folder with `<split>.jsonl` or another of these files, in the layout
            of a hub dataset, or saved by `datasets`; the id of a dataset on the Hugging Face hub, `owner/name` or
            `owner/name@revision`; or `python:` and the dotted path of a function that returns the rows of a split as
            dictionaries.
        split: split of a source with several. A file is one split, whatever its name, unless it is a `.json` with
            one object `{"train": […], "test": […]}`.
        subset: configuration of a hub dataset with several.

    Raises:
        DatasetError: missing, empty or malformed data; names the file and the line.
    """
    location = Path(path).expanduser()
    hub_id = parse_hub_id(path)
    if str(path).startswith(_FUNCTION):
        rows: Sequence[SourceRow] = _call_function(str(path), split)
    elif location.is_file():
        rows = _read_file(location, split)
    elif location.is_dir():
        rows = _read_folder(location, split, subset)
    elif files := sorted(glob.glob(str(location), recursive=True)):
        rows = _read_files(map(Path, files), split)
    elif hub_id is not None and _suffix(location) not in _READERS:
        rows = _read_hub(str(path), split, subset)
    else:
        raise DatasetError(
            f"no dataset at {path}: expected a file ({', '.join(_READERS)}), a folder, a pattern of files, a hub id "
            f"owner/name, or {_FUNCTION}package.module.function"
        )
    if not rows:
        raise DatasetError(f"dataset {path} (split {split}) is empty: expected at least one row")
    return rows


def column_value(row: SourceRow, key: str) -> Any:
    """Return the value of a column, or of a field in nested columns (`reward_model.ground_truth`).

    Raises:
        DatasetError: the row has no such key; names the row and its keys.
    """
    if key in row.data:
        return row.data[key]
    value: Any = row.data
    holder = "the row"
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            content = ", ".join(map(repr, value)) if isinstance(value, Mapping) else f"{value!r:.80}"
            raise DatasetError(f"{row.where}: no key {key!r}; {holder} has: {content or 'nothing'}")
        value, holder = value[name], repr(name)
    return value


def has_column(row: SourceRow, key: str) -> bool:
    """Return whether `column_value` finds a key."""
    try:
        column_value(row, key)
    except DatasetError:
        return False
    return True


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


def _suffix(path: Path) -> str:
    """Return the lower-case suffix of a file, `.gz` and `.zst` included: `.jsonl.gz`."""
    name = path.name.lower()
    return "".join(Path(name).suffixes[-2:]) if name.endswith((".gz", ".zst")) else Path(name).suffix


def _read_files(files: Iterable[Path], split: str) -> Sequence[SourceRow]:
    parts = [_read_file(file, split) for file in files]
    if all(isinstance(part, JsonLines) for part in parts):
        return JsonLines([line for part in cast(list[JsonLines], parts) for line in part.lines])
    return [row for part in parts for row in part]


def _read_file(path: Path, split: str) -> Sequence[SourceRow]:
    suffix = _suffix(path)
    if path.is_dir() or suffix not in _READERS:
        kind = "a folder" if path.is_dir() else f"suffix {suffix!r}"
        advice = '; write each document as a line {"text": …} of a .jsonl file' if suffix == ".txt" else ""
        raise DatasetError(f"cannot read {path}: expected a file ({', '.join(_READERS)}), got {kind}{advice}")
    try:
        with _open(path, suffix) as stream:
            start = stream.peek(64)
            if start.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DatasetError(f"{path}: UTF-16 text; expected UTF-8: convert it with iconv -f UTF-16 -t UTF-8")
            if start.startswith(b"version https://git-lfs"):
                raise DatasetError(f"{path}: a pointer of Git LFS, not the data; fetch it with git lfs pull")
            rows = _READERS[suffix](path, cast(BinaryIO, stream))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(f"{path}: damaged or not gzip: {error}; copy it again") from error
    return _nested_rows(rows[0], split) if len(rows) == 1 and suffix in _OBJECT_FILES else rows


def _open(path: Path, suffix: str) -> Any:
    if not suffix.endswith(".zst"):
        return gzip.open(path) if suffix.endswith(".gz") else path.open("rb")
    try:
        from pyarrow import input_stream  # type: ignore[import-untyped]
    except ImportError as error:
        raise DatasetError(f"{path} needs the package pyarrow, which {_NEEDS_EXTRA}") from error
    try:
        return io.BufferedReader(io.BytesIO(input_stream(str(path), compression="zstd").read()))
    except OSError as error:
        raise DatasetError(f"{path}: damaged or not zstd: {error}; copy it again") from error


def _nested_rows(row: SourceRow, split: str) -> list[SourceRow]:
    """Return the rows in a JSON object of lists, `{"train": […], "test": […]}` or `{"data": […]}`, or else the row."""
    tables = {
        name: value
        for name, value in row.data.items()
        if name in (split, *_SPLITS, *_TABLES)
        and isinstance(value, list)
        and value
        and all(isinstance(item, dict) for item in value)
    }
    splits = [name for name in tables if name not in _TABLES]
    if splits and split not in splits:
        raise DatasetError(f"{row.where}: no split {split!r}; expected one of {', '.join(splits)}")
    if not tables:
        return [row]
    name = split if splits else next(iter(tables))
    return [SourceRow(f"{row.where} {name}[{number}]", item) for number, item in enumerate(tables[name])]


def _read_json(path: Path, stream: BinaryIO) -> Sequence[SourceRow]:
    """Read one object a line, one list of objects, or one object on several lines."""
    lines = [(path, number, line) for number, line in enumerate(stream, start=1) if line.strip()]
    start = lines[0][2].removeprefix(b"\xef\xbb\xbf").strip() if lines else b""
    if not start.startswith(b"[") and start != b"{":
        return JsonLines(lines)
    stream.seek(0)
    content = _parse_json(stream.read(), path, 1)
    if start == b"{":
        return [_json_row(content, f"{path}:1")]
    return [_json_row(row, f"{path} row {index}") for index, row in enumerate(content)]


def _parse_json(text: bytes, path: Path, first_line: int) -> Any:
    """Parse JSON that starts at a line of a file; raise DatasetError with the line of the error."""
    where = f"{path}:{first_line}"
    try:
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        lines = text[: error.start].split(b"\n")
        raise DatasetError(
            f"{path}:{first_line + len(lines) - 1}: not UTF-8: {error.reason} at byte {len(lines[-1])} of the line"
        ) from error
    except json.JSONDecodeError as error:
        raise DatasetError(
            f"{path}:{first_line + error.lineno - 1}: not JSON: {error.msg} at column {error.colno}; expected one "
            "object a line, or one list of objects"
        ) from error
    except (ValueError, RecursionError) as error:  # a repeated key, a number of thousands of digits, endless brackets
        raise DatasetError(f"{where}: not JSON that can be read: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for a repeated key (Python would keep only its last value)."""
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {repeated!r} is repeated in one object; remove or rename one")
    return values


def _json_row(row: Any, where: str) -> SourceRow:
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected a JSON object {{…}}, got {type(row).__name__}")
    return SourceRow(where, row)


def _read_csv(path: Path, stream: BinaryIO) -> list[SourceRow]:
    """Read a table with column names in its first line; every value is text."""
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    rows = []
    try:
        columns = next(lines, [])
        if len({*columns}) != len(columns):
            raise DatasetError(f"{path}:1: a column name is repeated: {', '.join(columns)}; rename one")
        for values in lines:
            if not values:
                continue
            if len(values) != len(columns):
                raise DatasetError(
                    f"{path}:{lines.line_num}: {len(values)} values for {len(columns)} columns ({', '.join(columns)}); "
                    'put values with commas, quotes or line ends between double quotes, and write " as ""'
                )
            rows.append(SourceRow(f"{path}:{lines.line_num}", dict(zip(columns, values, strict=True))))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: not CSV in UTF-8 after line {lines.line_num}: {error}") from error
    return rows


def _read_parquet(path: Path, stream: BinaryIO) -> list[SourceRow]:
    """Read a parquet file, without the columns that pyarrow derives from names of folders (`split=train/`)."""
    from pyarrow import parquet

    return _table_rows(path, parquet.ParquetFile(stream).read())


def _read_arrow(path: Path, stream: BinaryIO) -> list[SourceRow]:
    """Read an Arrow file, or the stream that `datasets` writes."""
    from pyarrow import ipc

    is_file = stream.peek(6).startswith(b"ARROW1")  # type: ignore[attr-defined]
    return _table_rows(path, (ipc.open_file if is_file else ipc.open_stream)(stream).read_all())


def _table_rows(path: Path, table: Any) -> list[SourceRow]:
    table.validate(full=True)  # reading damaged offsets would crash the process
    if len({*table.column_names}) != len(table.column_names):
        raise DatasetError(f"{path}: a column name is repeated: {', '.join(table.column_names)}; rename one")
    return [SourceRow(f"{path} row {number}", without_nulls(row)) for number, row in enumerate(table.to_pylist())]


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table without null fields inside its columns.

    Arrow gives every object of a column the fields of all rows. The arguments of one tool then hold the names of all
    other arguments, as nulls. An explicit null is lost with them.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(item) for key, item in value.items() if item is not None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return {column: clean(value) for column, value in row.items()}


def _with_pyarrow(kind: str, read: Callable[[Path, BinaryIO], list[SourceRow]]) -> Callable[..., list[SourceRow]]:
    """Wrap a reader so that its errors and a missing package are reported in one line."""

    def read_table(path: Path, stream: BinaryIO) -> list[SourceRow]:
        try:
            import pyarrow
        except ImportError as error:
            raise DatasetError(f"{path} needs the package pyarrow, which {_NEEDS_EXTRA}") from error
        try:
            return read(path, stream)
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{path}: not {kind} file, or damaged: {' '.join(str(error).split())}") from error

    return read_table


_READERS: dict[str, Callable[[Path, BinaryIO], Sequence[SourceRow]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".ndjson": _read_json,
    ".csv": _read_csv,
    ".jsonl.gz": _read_json,
    ".json.gz": _read_json,
    ".csv.gz": _read_csv,
    ".jsonl.zst": _read_json,
    ".parquet": _with_pyarrow("a parquet", _read_parquet),
    ".arrow": _with_pyarrow("an Arrow", _read_arrow),
}


def _read_folder(folder: Path, split: str, subset: str | None = None) -> Sequence[SourceRow]:
    """Return the rows of `<split>.jsonl` or another file of that name, else of the layouts that `datasets` knows."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _from_hugging_face(_import_datasets(folder).load_from_disk(str(folder)), str(folder), split)
    named = [f for f in folder.iterdir() if f.name.lower() in {f"{split}{suffix}".lower() for suffix in _READERS}]
    if len(named) > 1:
        names = ", ".join(sorted(file.name for file in named))
        raise DatasetError(f"{folder} holds split {split!r} in several files: {names}; set path to one of them")
    if named and (subset is None or not has_subsets(folder)):
        return _read_file(named[0], split)
    files = _split_files(folder, split, subset)
    _require_all_shards(files)
    return _read_files(files, split)


def local_files(path: str | Path) -> dict[str, Path]:
    """Return the files that `open_rows` may read, by name; none for a source other than files."""
    location = Path(path).expanduser()
    if location.is_file():  # its name may have the characters of a pattern
        return {location.suffix: location}
    if location.is_dir():
        found = [Path(root, name) for root, _, names in os.walk(location, followlinks=True) for name in names]
        return {str(file.relative_to(location)): file for file in sorted(found)}
    return {Path(file).name: Path(file) for file in sorted(glob.glob(str(location), recursive=True))}


def has_splits(path: str | Path) -> bool:
    """Return whether a source may have several splits, unlike a file and a pattern of files."""
    return Path(path).expanduser().is_dir() or not local_files(path)


def has_subsets(path: str | Path) -> bool:
    """Return whether a source may have several configurations: a hub dataset, or a folder with them in its README."""
    location = Path(path).expanduser()
    readme = location / "README.md"
    return not location.exists() or (readme.is_file() and b"config_name:" in readme.read_bytes())


def _split_files(folder: Path, split: str, subset: str | None) -> list[Path]:
    """Return the files of a split, by the README of a hub dataset or by their names (`data/train-00000-of-00002…`).

    Raises:
        DatasetError: no file, no such split or subset, or files of another format that would be dropped.
    """
    library = _import_datasets(folder)
    try:
        splits = library.load_dataset_builder(str(folder), subset).config.data_files or {}
    except Exception as error:  # of datasets, of its YAML parser, …
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        reason = " ".join(str(error).split()).partition(" Example of usage")[0]
        raise DatasetError(
            f"no split {split!r} in {folder}: expected {split}.jsonl (or {', '.join(_READERS)}), or the files of a hub "
            f"dataset, whose configuration is chosen by subset; found {present} ({reason})"
        ) from error
    if split not in splits:
        raise DatasetError(f"no split {split!r} in {folder}: expected one of {', '.join(map(str, splits))}")
    files = [Path(file) for file in splits[split]]
    # datasets reads one format of a folder, and drops the others.
    dropped = {file.absolute() for file in folder.rglob("*") if _suffix(file) in _READERS}
    dropped -= {Path(file) for split_files in splits.values() for file in split_files}
    is_named = any(split in file.name for file in files)
    for file in sorted(dropped) if subset is None else ():
        if _suffix(file) != _suffix(files[0]) and (split in file.name or not is_named):
            raise DatasetError(
                f"{folder} holds files of several formats: {files[0].name}, {file.name}; set path to a pattern of the "
                f"files to read, such as {folder}/*{_suffix(files[0])}"
            )
    return files


def _require_all_shards(files: Iterable[Path]) -> None:
    """Raise DatasetError if one of the files `NAME-00000-of-00002` … is missing."""
    shards = [(file.parent, match) for file in files if (match := _SHARD.fullmatch(file.name))]
    counts = Counter((parent, match["name"], int(match["count"])) for parent, match in shards)
    for (parent, name, count), n_present in counts.items():
        if n_present != count:
            raise DatasetError(
                f"{parent} holds {n_present} of the {count} files {name}-…-of-{count:05d}; copy or download the others"
            )


def _read_hub(path: str, split: str, subset: str | None) -> Sequence[SourceRow]:
    library, hub_id = _import_datasets(path), parse_hub_id(path)
    assert hub_id is not None
    if not is_reachable(hub_id, "dataset"):  # load_dataset would try for a minute, and not look into the hub's cache
        return _read_folder(hub_snapshot(hub_id, "dataset", offline=True), split, subset)
    try:
        loaded = library.load_dataset(hub_id.name, subset, split=split, revision=hub_id.revision)
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise DatasetError(
            f"cannot load {path} (split {split}): no such file or folder, and from the hub: {reason}"
        ) from error
    return _from_hugging_face(loaded, path, split)


def _from_hugging_face(loaded: Any, name: str, split: str) -> list[SourceRow]:
    if hasattr(loaded, "keys"):
        if split not in loaded:
            raise DatasetError(f"no split {split!r} in {name}: expected one of {', '.join(loaded)}")
        loaded = loaded[split]
    return [SourceRow(f"{name}[{split}] row {number}", without_nulls(row)) for number, row in enumerate(loaded)]


def _import_datasets(source: object) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(f"{source} needs the package datasets, which {_NEEDS_EXTRA}") from error
    return datasets
