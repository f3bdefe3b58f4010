"""Token rows of large data sets: encoded by several processes, kept in arrays, and cached on disk.

A list of 100,000 rows of 2,500 tokens would take 10 GB as Python integers, and a resume would render it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import current_process, get_context, parent_process
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np

from archon.data.bad_rows import BadRows, Notes, Policy
from archon.data.sources import RowBudget, SourceRow
from archon.schema.capacity import cores
from archon.schema.children import end_with_parent, marked_environment
from archon.schema.errors import DatasetError
from archon.schema.files import open_regular

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Encode = Callable[[Sequence[SourceRow], Notes], list[Row]]

CHUNK = 500
"""Rows that are encoded together. A smaller data set stays a list."""
Chunk: TypeAlias = "tuple[TokenRows | None, BadRows]"
"""Encoded rows of a chunk (None if all were skipped), with its errors and notes."""
_POOL_SECONDS = 20.0  # expected time from which worker processes are started; a start takes some seconds
CACHED_BYTES = 2**24
"""Size of source files from which their rows are cached."""
_FORMAT = 3  # of a cached folder; raise it when the encoding of rows changes


class TokenRows(Sequence[Row]):
    """Rows of token lists, such as `{"input_ids", "loss_mask"}`, in one int32 array per column.

    Args:
        columns: by name, all tokens and the start of every row in them, with the end of the last (int64 [n + 1]).
        order: numbers of the selected rows; by default all.
    """

    def __init__(
        self, columns: Mapping[str, tuple[np.ndarray, np.ndarray]], order: Sequence[int] | None = None
    ) -> None:
        self.columns = dict(columns)
        n_rows = len(next(iter(self.columns.values()))[1]) - 1
        self.order: Sequence[int] = range(n_rows) if order is None else order

    @classmethod
    def of(cls, rows: Sequence[Row]) -> TokenRows:
        """Return rows of lists of int as arrays."""
        columns = {}
        for name in rows[0]:
            starts = np.cumsum([0, *(len(row[name]) for row in rows)])
            dtype = np.int8 if name.endswith("loss_mask") else np.int32
            tokens = np.fromiter((token for row in rows for token in row[name]), dtype, int(starts[-1]))
            columns[name] = tokens, starts
        return cls(columns)

    @classmethod
    def concatenate(cls, parts: Sequence[TokenRows]) -> TokenRows:
        """Return the rows of all parts; no part may be a selection."""
        columns = {}
        for name in parts[0].columns:
            tokens = np.concatenate([part.columns[name][0] for part in parts])
            lengths = np.concatenate([np.diff(part.columns[name][1]) for part in parts])
            columns[name] = tokens, np.concatenate([[0], np.cumsum(lengths)])
        return cls(columns)

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> TokenRows: ...
    def __getitem__(self, index: int | slice) -> Row | TokenRows:
        """Return a row as lists of int, or a selection of rows."""
        if isinstance(index, slice):
            return TokenRows(self.columns, self.order[index])
        number = self.order[index]
        return {
            name: tokens[starts[number] : starts[number + 1]].tolist()
            for name, (tokens, starts) in self.columns.items()
        }

    def select(self, numbers: Sequence[int]) -> TokenRows:
        """Return the rows with these numbers."""
        return TokenRows(self.columns, [self.order[number] for number in numbers])

    def compact(self) -> TokenRows:
        """Return the same rows without the tokens of others."""
        if self.order == range(len(next(iter(self.columns.values()))[1]) - 1):
            return self
        columns = {}
        for name, (tokens, starts) in self.columns.items():
            kept = [tokens[starts[number] : starts[number + 1]] for number in self.order]
            columns[name] = np.concatenate(kept), np.cumsum([0, *map(len, kept)])
        return TokenRows(columns)

    def lengths(self, name: str) -> list[int]:
        """Return the number of tokens of every row in a column."""
        return np.diff(self.columns[name][1])[np.asarray(self.order, dtype=np.int64)].tolist()


def row_lengths(rows: Sequence[Row], names: Sequence[str]) -> list[int]:
    """Return the largest number of tokens in the columns `names` of every row, of those that the row has."""
    if isinstance(rows, TokenRows):
        return [max(sizes) for sizes in zip(*(rows.lengths(n) for n in names if n in rows.columns), strict=True)]
    return [max(len(row[name]) for name in names if name in row) for row in rows]


def encode_rows(
    source: Sequence[SourceRow], encode: Encode, title: str, bad_rows: BadRows | None = None
) -> Sequence[Row]:
    """Encode rows in chunks, with a progress bar, and in one process per core if that takes long.

    Args:
        source: rows.
        encode: returns rows of token lists for some source rows, and counts notes on them; can be pickled.
        title: of the progress bar.
        bad_rows: converter that handles unusable rows; by default the first one is an error.

    Returns:
        A list, or `TokenRows` for more than `CHUNK` rows.
    """
    bad = bad_rows or BadRows()
    if len(source) <= CHUNK:
        return bad.convert(source, encode)
    _require_main()
    encode_chunk = partial(_encode_chunk, encode=encode, policy=bad.policy)
    start = time.monotonic()
    parts = [encode_chunk(source[:CHUNK])]
    expected = (time.monotonic() - start) * (len(source) / CHUNK - 1)
    chunks = [source[at : at + CHUNK] for at in range(CHUNK, len(source), CHUNK)]
    with _progress(title, len(source), expected) as advance:
        advance(CHUNK)
        workers = int(cores())
        if expected > _POOL_SECONDS and workers > 1 and parent_process() is None:
            try:
                # Spawned: a fork of a process with threads (torch, tokenizers) may deadlock.
                with (
                    marked_environment(),
                    ProcessPoolExecutor(workers, get_context("spawn"), _set_encoder, (encode_chunk,)) as pool,
                ):
                    for part in pool.map(_encode_in_worker, chunks):
                        parts.append(part)
                        advance(CHUNK)
            except BrokenProcessPool:  # a script without `if __name__ == "__main__"` cannot be imported by a worker
                del parts[1:]
        for chunk in chunks[len(parts) - 1 :]:
            parts.append(encode_chunk(chunk))
            advance(len(chunk))
    for _, report in parts:
        bad.errors += report.errors
        bad.notes += report.notes
    encoded = [rows for rows, _ in parts if rows is not None]
    return TokenRows.concatenate(encoded) if encoded else []


def _require_main() -> None:
    """Raise in a worker process that is importing the user's script, which would start the work a second time.

    Such a process has its name, but not yet its parent.
    """
    if parent_process() is None and current_process().name != "MainProcess":
        raise DatasetError("a worker process imports this script: put its work under `if __name__ == '__main__':`")


def _encode_chunk(chunk: Sequence[SourceRow], encode: Encode, policy: Policy) -> Chunk:
    bad = BadRows(policy)
    rows = bad.convert(chunk, encode)
    return TokenRows.of(rows) if rows else None, bad


_worker_encoder: Callable[[Sequence[SourceRow]], Chunk] | None = None


def _set_encoder(encoder: Callable[[Sequence[SourceRow]], Chunk]) -> None:
    global _worker_encoder
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core
    _worker_encoder = encoder


def _encode_in_worker(chunk: Sequence[SourceRow]) -> Chunk:
    assert _worker_encoder is not None
    return _worker_encoder(chunk)


@contextmanager
def _progress(title: str, total: int, seconds: float) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if the work takes long."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=seconds < 2.0) as bar:
        task = bar.add_task(title, total=total)
        yield lambda rows: bar.advance(task, rows)


def cached_rows(
    files: Mapping[str, Path], recipe: Any, prepare: Callable[[], tuple[Sequence[Row], Row]]
) -> tuple[Sequence[Row], Row]:
    """Return the rows of source files from the cache; prepare and keep them if they are not there.

    One process prepares them while others, such as the other ranks, wait. The cache is `$ARCHON_CACHE`, by default
    `~/.cache/archon`, in the folder `rows`; deleting it costs only time. A cache that cannot be written or read costs a
    warning.

    Args:
        files: source files by their names in the data set. Names and contents are part of the key.
        recipe: everything else that decides the rows, JSON-compatible.
        prepare: returns the rows, and facts about them that are JSON-compatible.
    """
    _require_main()
    digest = hashlib.blake2b(json.dumps([_FORMAT, recipe, [*files]], sort_keys=True, default=repr).encode())
    for file in files.values():
        with open_regular(file, DatasetError) as stream:
            RowBudget(file).add(os.fstat(stream.fileno()).st_size, 0)  # its rows would not fit: do not read all of it
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    folder = Path(os.environ.get("ARCHON_CACHE") or "~/.cache/archon").expanduser() / "rows" / digest.hexdigest()[:32]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock").open("w")
    except OSError as error:
        logger.warning("the rows are not cached: %s (set ARCHON_CACHE to a folder that can be written)", error)
        return prepare()
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if folder.is_dir():
                return _load(folder)
        except (OSError, ValueError, EOFError, KeyError) as error:
            logger.warning("the cached rows in %s are damaged and are prepared again: %s", folder, error)
            shutil.rmtree(folder)
        rows, facts = prepare()
        if isinstance(rows, TokenRows):
            staged = folder.with_suffix(".partial")
            try:
                shutil.rmtree(staged, ignore_errors=True)
                _save(staged, rows.compact(), facts)
                staged.rename(folder)
            except OSError as error:
                logger.warning("the rows are not cached in %s: %s", folder.parent, error)
                shutil.rmtree(staged, ignore_errors=True)
        return rows, facts


def _save(folder: Path, rows: TokenRows, facts: Row) -> None:
    folder.mkdir()
    for name, (tokens, starts) in rows.columns.items():
        np.save(folder / f"{name}.npy", tokens)
        np.save(folder / f"{name}.starts.npy", starts)
    (folder / "facts.json").write_text(json.dumps({"columns": [*rows.columns], **facts}), encoding="utf-8")


def _load(folder: Path) -> tuple[TokenRows, Row]:
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    columns = {}
    for name in facts.pop("columns"):
        tokens, starts = (np.load(folder / f"{name}{suffix}.npy", mmap_mode="r") for suffix in ("", ".starts"))
        if len(tokens) != starts[-1]:
            raise ValueError(f"{name} has {len(tokens)} tokens, expected {starts[-1]}")
        columns[name] = tokens, starts
    return TokenRows(columns), facts
