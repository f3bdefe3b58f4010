"""Reader of rows and their locations: files (JSON, CSV, parquet, Arrow), folders, hub datasets and functions."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, AnyStr, BinaryIO, NamedTuple, cast, overload

from archon.checkpoint.hub import hub_snapshot, is_reachable, parse_hub_id
from archon.schema.capacity import memory_bytes
from archon.schema.errors import DatasetError, describe_error
from archon.schema.files import JSON_BYTES, open_regular, read_limited, shown_path
from archon.schema.lazy import import_dotted
from archon.schema.user_code import user_code

_FUNCTION = "python:"
_SPLITS = ("train", "validation", "test")
_TABLES = ("data", "rows")  # names of a list of rows in a JSON object
_OBJECT_FILES = (".json", ".json.gz")  # in JSON Lines an object is a row, also if it is the only one
_SHARD = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\..*")
ROW_BYTES = 2**26
"""Maximum bytes of a line. It holds the largest image in base64; parsing takes up to 25 times its bytes."""
LIST_BYTES = 2**32
"""Maximum bytes of a JSON file that is one list or object, because it is parsed whole. JSON Lines may be larger."""
ROW_COLUMNS = 10_000
"""Maximum number of columns of a row, and of keys of an object in it."""
ROW_DEPTH = 100
"""Maximum nesting of lists and objects in a row. Code that copies rows is recursive, and Python limits recursion."""
MEMORY_SHARE = 0.5
"""Maximum fraction of the machine's memory for the rows of one file, after decompression."""
_ROW_OVERHEAD = 512  # bytes of an empty row in memory
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # end of an Arrow stream; every message starts with the first four bytes
_BATCH_ROWS = 1024  # of a parquet file: rows that are decompressed together
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
    elif os.path.isfile(location):  # False for a name that no file can have, unlike Path.is_file
        rows = _read_file(location, split)
    elif os.path.isdir(location):
        rows = _read_folder(location, split, subset)
    elif files := sorted(glob.glob(str(location), recursive=True)):
        rows = _read_files(map(Path, files), split)
    elif hub_id is not None and _suffix(location) not in _READERS:
        rows = _read_hub(str(path), split, subset)
    else:
        raise DatasetError(
            f"no dataset at {shown_path(str(path))}: expected a file ({', '.join(_READERS)}), a folder, a pattern of "
            f"files, a hub id owner/name, or {_FUNCTION}package.module.function"
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
    """Return the folder of a named dataset: `explicit`, or `$ARCHON_DATA/<name>`.

    Raises:
        DatasetError: the folder does not exist, or neither is set.
    """
    advice = f"pass its folder as data_dir, or set ARCHON_DATA to the folder that holds {name}/"
    if explicit is not None:
        folder = Path(explicit).expanduser()
    elif os.environ.get("ARCHON_DATA"):
        folder = Path(os.environ["ARCHON_DATA"]).expanduser() / name
    else:
        raise DatasetError(f"dataset {name}: its folder is not known; {advice}")
    if folder.is_dir():
        return folder
    raise DatasetError(f"dataset {name} is not at {folder}: {advice}")


def _call_function(path: str, split: str) -> list[SourceRow]:
    """Return the rows of a user's function. Its exceptions pass through, except exits such as `sys.exit`."""
    function = import_dotted(path.removeprefix(_FUNCTION), "dataset function")
    rows: list[SourceRow] = []
    with user_code(f"dataset function {path}", DatasetError):
        returned = function(split) if callable(function) else None
        if not isinstance(returned, Iterable):
            raise DatasetError(f"{path}: expected a function that returns the rows of a split, as dictionaries")
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
    if os.path.isdir(path) or suffix not in _READERS:
        kind = "a folder" if os.path.isdir(path) else f"suffix {suffix!r}"
        advice = '; write each document as a line {"text": …} of a .jsonl file' if suffix == ".txt" else ""
        raise DatasetError(f"cannot read {path}: expected a file ({', '.join(_READERS)}), got {kind}{advice}")
    with open_regular(path, DatasetError) as file:
        try:
            stream = _decompressed(file, path, suffix)
            start = stream.peek(64)
            if start.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DatasetError(f"{path}: UTF-16 text; expected UTF-8: convert it with iconv -f UTF-16 -t UTF-8")
            if start.startswith(b"version https://git-lfs"):
                raise DatasetError(f"{path}: a pointer of Git LFS, not the data; fetch it with git lfs pull")
            rows = _READERS[suffix](path, cast(BinaryIO, stream))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DatasetError(f"{path}: damaged or not gzip: {error}; copy it again") from error
        except OSError as error:
            kind = "damaged or not zstd" if suffix.endswith(".zst") else "cannot be read"
            raise DatasetError(f"{path}: {kind}: {' '.join(str(error).split())}; copy it again") from error
    return _nested_rows(rows[0], split) if len(rows) == 1 and suffix in _OBJECT_FILES else rows


def _decompressed(file: BinaryIO, path: Path, suffix: str) -> Any:
    """Return the content of an open file as a buffered stream, which decompresses while it is read."""
    if suffix.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    if not suffix.endswith(".zst"):
        return file
    try:
        from pyarrow import CompressedInputStream  # type: ignore[import-untyped]
    except ImportError as error:
        raise DatasetError(f"{path} needs the package pyarrow, which {_NEEDS_EXTRA}") from error
    return io.BufferedReader(CompressedInputStream(file, "zstd"))


class RowBudget:
    """Memory budget for the rows of one file; raises DatasetError if it is exceeded."""

    def __init__(self, path: Path) -> None:
        self.path, self.n_bytes = path, 0
        self.limit = int(MEMORY_SHARE * memory_bytes())

    def add(self, n_bytes: int, n_rows: int = 1) -> None:
        """Count rows. Raises DatasetError if they fill the budget."""
        self.n_bytes += n_bytes + n_rows * _ROW_OVERHEAD
        if self.n_bytes > self.limit:
            raise DatasetError(
                f"{self.path}: its rows take more than {self.limit:,} bytes, {MEMORY_SHARE:.0%} of this machine's "
                "memory; split the file, or use a machine with more memory"
            )


def _limited_lines(path: Path, pieces: Iterable[AnyStr], first: int = 1) -> Iterator[AnyStr]:
    """Yield lines, and refuse a line that is too long.

    Args:
        path: the file, for errors.
        pieces: lines, each read up to `ROW_BYTES` + 1.
        first: number of the first line.

    Raises:
        DatasetError: a line is longer than `ROW_BYTES`, or the lines fill the memory.
    """
    budget = RowBudget(path)
    for number, line in enumerate(pieces, start=first):
        if len(line) > ROW_BYTES:
            raise DatasetError(
                f"{path}:{number}: the line is longer than {ROW_BYTES:,} bytes; expected one row a line: store large "
                "values, such as images, in files that the row names"
            )
        budget.add(len(line))
        yield line


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
    pieces = iter(partial(stream.readline, ROW_BYTES + 1), b"")
    number, line = next(((at, line) for at, line in enumerate(pieces, start=1) if line.strip()), (1, b""))
    start = line[:64].removeprefix(b"\xef\xbb\xbf").strip()
    if start.startswith(b"[") or (start == b"{" and len(line) < 64):
        text = b"\n" * (number - 1) + line + stream.read(LIST_BYTES - len(line) + 1)
        if len(text) > LIST_BYTES:
            raise DatasetError(
                f"{path}: a JSON list of more than {LIST_BYTES:,} bytes; write one object a line instead"
            )
        content = _parse_json(text, path, 1)
        if isinstance(content, dict):
            return [_json_row(content, f"{path}:1")]
        return [_json_row(row, f"{path} row {index}") for index, row in enumerate(content)]
    lines = _limited_lines(path, chain([line], pieces), number)
    return JsonLines([(path, at, line) for at, line in enumerate(lines, start=number) if line.strip()])


def _parse_json(text: bytes, path: Path, first_line: int) -> Any:
    """Parse JSON that starts at a line of a file; raise DatasetError with the line of the error."""
    where = f"{path}:{first_line}"
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
        if text.count(b"[") + text.count(b"{") > ROW_DEPTH:
            _require_shallow(value)
        return value
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
    if len(pairs) > ROW_COLUMNS:
        raise ValueError(f"an object has {len(pairs):,} keys; expected at most {ROW_COLUMNS:,}")
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {repeated!r} is repeated in one object; remove or rename one")
    return values


def _require_shallow(value: Any) -> None:
    """Raise ValueError for lists and objects nested deeper than `ROW_DEPTH`, not counting the list of rows."""
    level = [value]
    for _ in range(ROW_DEPTH + 1):
        nested = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for children in nested for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise ValueError(f"lists and objects are nested deeper than {ROW_DEPTH} levels")


def _require_few_columns(columns: Sequence[str], where: object) -> None:
    if len(columns) > ROW_COLUMNS:
        raise DatasetError(f"{where}: {len(columns):,} columns; expected at most {ROW_COLUMNS:,}")
    if len({*columns}) != len(columns):
        raise DatasetError(f"{where}: a column name is repeated: {', '.join(columns)[:200]}; rename one")


def _json_row(row: Any, where: str) -> SourceRow:
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected a JSON object {{…}}, got {type(row).__name__}")
    return SourceRow(where, row)


def _read_csv(path: Path, stream: BinaryIO) -> list[SourceRow]:
    """Read a table with column names in its first line; every value is text."""
    csv.field_size_limit(ROW_BYTES)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    pieces = iter(partial(text.readline, ROW_BYTES + 1), "")
    lines = csv.reader(_limited_lines(path, pieces), strict=True)
    rows = []
    try:
        columns = next(lines, [])
        _require_few_columns(columns, f"{path}:1")
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

    if not stream.peek(4).startswith(b"PAR1"):  # type: ignore[attr-defined]
        raise DatasetError(f"{path}: not a parquet file, or damaged: it does not start with PAR1")
    file = parquet.ParquetFile(stream, page_checksum_verification=True)
    _require_few_columns(file.schema_arrow.names, path)
    return _batch_rows(path, file.iter_batches(_BATCH_ROWS))


def _read_arrow(path: Path, stream: BinaryIO) -> list[SourceRow]:
    """Read an Arrow file, or the stream that `datasets` writes."""
    return _batch_rows(path, _arrow_batches(path, stream))


def _check_arrow(path: Path, stream: BinaryIO) -> list[SourceRow]:
    """Read an Arrow file without keeping its rows."""
    for batch in _arrow_batches(path, stream):
        batch.validate(full=True)
    return []


def _arrow_batches(path: Path, stream: BinaryIO) -> Iterator[Any]:
    from pyarrow import ipc

    start = stream.peek(6)  # type: ignore[attr-defined]
    is_file = start.startswith(b"ARROW1")
    if not is_file:  # pyarrow reads a stream that was cut after a batch as if it were whole
        end = _STREAM_END if start.startswith(_STREAM_END[:4]) else _STREAM_END[4:]  # before Arrow 0.15
        stream.seek(-min(len(end), stream.seek(0, io.SEEK_END)), io.SEEK_END)
        if stream.read() != end:
            raise DatasetError(f"{path}: not an Arrow file, or damaged: no end mark, so it may be cut; copy it again")
        stream.seek(0)
    opened = (ipc.open_file if is_file else ipc.open_stream)(stream)
    _require_few_columns(opened.schema.names, path)
    numbers = range(opened.num_record_batches) if is_file else ()
    yield from map(opened.get_batch, numbers) if is_file else opened


def _batch_rows(path: Path, batches: Iterable[Any]) -> list[SourceRow]:
    budget, rows = RowBudget(path), list[SourceRow]()
    for batch in batches:
        batch.validate(full=True)  # reading damaged offsets would crash the process
        budget.add(batch.nbytes, batch.num_rows)
        rows += [SourceRow(f"{path} row {n}", without_nulls(row)) for n, row in enumerate(batch.to_pylist(), len(rows))]
    return rows


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
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            # A damaged size may be larger than any memory.
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise DatasetError(f"{path}: not {kind} file, or damaged: {reason}") from error

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
        return _from_hugging_face(_load_saved(folder), str(folder), split)
    named = [f for f in folder.iterdir() if f.name.lower() in {f"{split}{suffix}".lower() for suffix in _READERS}]
    if len(named) > 1:
        names = ", ".join(sorted(file.name for file in named))
        raise DatasetError(f"{folder} holds split {split!r} in several files: {names}; set path to one of them")
    if named and (subset is None or not has_subsets(folder)):
        return _read_file(named[0], split)
    files = _split_files(folder, split, subset)
    _require_all_shards(files)
    return _read_files(files, split)


def _load_saved(folder: Path) -> Any:
    """Return what `datasets` has saved in a folder. Its files are mapped into memory, so they are checked first."""
    library = _import_datasets(folder)
    for file in _regular_files(folder, set()):
        if file.suffix == ".arrow":
            with open_regular(file, DatasetError) as stream:
                _with_pyarrow("an Arrow", _check_arrow)(file, stream)
    try:
        return library.load_from_disk(str(folder))
    except Exception as error:  # of datasets: JSON, types of columns, missing files
        raise DatasetError(
            f"{folder}: saved by datasets, but it cannot be loaded: {describe_error(error)}; save it again"
        ) from error


def local_files(path: str | Path) -> dict[str, Path]:
    """Return the files that `open_rows` may read, by name; none for a source other than files."""
    location = Path(path).expanduser()
    if os.path.isfile(location):  # its name may have the characters of a pattern
        return {location.suffix: location}
    if os.path.isdir(location):
        return {str(file.relative_to(location)): file for file in sorted(_regular_files(location, set()))}
    return {Path(file).name: Path(file) for file in sorted(glob.glob(str(location), recursive=True))}


def _regular_files(folder: Path, visited: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the regular files of a folder and its subfolders. Links are followed; each folder is visited once."""
    status = folder.stat()
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_file():
            yield Path(entry.path)
        elif entry.is_dir():
            yield from _regular_files(Path(entry.path), visited)


def has_splits(path: str | Path) -> bool:
    """Return whether a source may have several splits, unlike a file and a pattern of files."""
    return os.path.isdir(Path(path).expanduser()) or not local_files(path)


def has_subsets(path: str | Path) -> bool:
    """Return whether a source may have several configurations: a hub dataset, or a folder with them in its README."""
    location = Path(path).expanduser()
    readme = location / "README.md"
    if not os.path.exists(location):
        return True
    return os.path.isfile(readme) and b"config_name:" in read_limited(readme, JSON_BYTES, DatasetError)


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
