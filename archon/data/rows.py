"""`RowDataset`: rows in memory, with the methods of Hugging Face datasets that loaders are written with."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from archon.schema.errors import DatasetError

Row = dict[str, Any]

# Options of Hugging Face's `map` and `filter` that affect speed or output, but not the rows.
_TUNING = frozenset({"num_proc", "desc", "load_from_cache_file", "keep_in_memory", "writer_batch_size"})
_FINGERPRINT_ROWS = 64


class LocatedRow(dict[str, Any]):
    """Row that knows its location in the source, for errors."""

    def __init__(self, where: str, values: Row) -> None:
        super().__init__(values)
        self.where = where


def row_fingerprint(rows: Sequence[Any], key: Callable[[Any], Any] = lambda row: row) -> str:
    """Return a hash of `key` of some evenly spaced rows, which detects other rows or another order."""
    count = min(_FINGERPRINT_ROWS, len(rows))
    sample = [key(rows[index * len(rows) // count]) for index in range(count)]
    try:
        text = json.dumps([len(rows), sample], sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError) as error:  # keys of several types, a row within itself
        raise DatasetError(
            f"a row is not JSON-compatible: {error}; expected strings, numbers, lists and mappings"
        ) from None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RowDataset(Sequence[Row]):
    """Rows in memory, in the source's order.

    `map`, `filter`, `select`, `shuffle`, `remove_columns` and `rename_column` return a new dataset, as in Hugging
    Face datasets; options that only change their speed (`num_proc`, …) are accepted and have no effect.

    Attributes:
        name: name of the dataset, for messages.
        rows: the rows.
        n_filtered: number of rows that were dropped because they were longer than `max_length` tokens.
        n_skipped: number of rows that were left out because they cannot be used.
        source_fingerprint: hash of the source rows and options that encoded rows were rendered from; None if unknown.
    """

    name: str
    rows: Sequence[Row]
    n_filtered: int = 0
    n_skipped: int = 0
    source_fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(self, index: int | slice | str) -> Row | Sequence[Row] | list[Any]:
        """Return a row by its number, a list of rows by a slice, or a column by its name."""
        if isinstance(index, str):
            self._require_columns([index])
            return [row.get(index) for row in self.rows]
        return self.rows[index]

    @property
    def column_names(self) -> list[str]:
        """Names of all columns, in order of first occurrence."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def map(
        self,
        function: Callable[..., Row | None],
        *,
        with_indices: bool = False,
        remove_columns: str | Iterable[str] = (),
        **tuning: Any,
    ) -> RowDataset:
        """Return the dataset with the results of `function` for each row (and its number) merged into it.

        The function receives a copy of the row. If it returns None or the unmodified row, nothing changes;
        `remove_columns` names columns to drop, unless the function returns them in a new dictionary.
        """
        self._require_tuning("map", tuning)
        removed = self._require_columns(remove_columns)
        rows = []
        for number, row in enumerate(self.rows):
            copied = copy.deepcopy(row)
            added = function(copied, number) if with_indices else function(copied)
            if added is None:
                added = {}
            elif not isinstance(added, dict):
                raise DatasetError(
                    f"{self.name}: the function of map returned a {type(added).__name__} for row {number}, expected a "
                    "dictionary of columns, or None"
                )
            dropped = removed if added is copied else removed - added.keys()
            rows.append({name: value for name, value in {**row, **added}.items() if name not in dropped})
        return replace(self, rows=rows)

    def filter(self, function: Callable[..., bool], *, with_indices: bool = False, **tuning: Any) -> RowDataset:
        """Return the rows for which `function` of the row (and of its number) is true."""
        self._require_tuning("filter", tuning)
        kept = [
            row for number, row in enumerate(self.rows) if (function(row, number) if with_indices else function(row))
        ]
        return replace(self, rows=kept)

    def select(self, indices: Iterable[int]) -> RowDataset:
        """Return the rows with these numbers, in their order."""
        return replace(self, rows=[self.rows[index] for index in indices])

    def shuffle(self, seed: int = 0) -> RowDataset:
        """Return the rows in an order that the seed determines (another one than Hugging Face's for this seed)."""
        rows = list(self.rows)
        random.Random(seed).shuffle(rows)
        return replace(self, rows=rows)

    def remove_columns(self, names: str | Iterable[str]) -> RowDataset:
        """Return the dataset without these columns."""
        removed = self._require_columns(names)
        return replace(self, rows=[{k: v for k, v in row.items() if k not in removed} for row in self.rows])

    def rename_column(self, old: str, new: str) -> RowDataset:
        """Return the dataset with a column under another name, in the same place."""
        self._require_columns([old])
        if new in self.column_names:
            raise DatasetError(f"{self.name} has a column {new!r} already; remove it first, or choose another name")
        return replace(self, rows=[{(new if k == old else k): v for k, v in row.items()} for row in self.rows])

    def _require_columns(self, names: str | Iterable[str]) -> set[str]:
        required = {names} if isinstance(names, str) else set(names)
        if missing := sorted(required - set(self.column_names)):
            raise DatasetError(f"{self.name} has no column {missing[0]!r}; it has {', '.join(self.column_names)}")
        return required

    def _require_tuning(self, method: str, options: dict[str, Any]) -> None:
        if unknown := sorted(options.keys() - _TUNING):
            raise DatasetError(
                f"{self.name}.{method} has no option {unknown[0]!r}; make a Hugging Face dataset of the rows for it: "
                "datasets.Dataset.from_list(list(rows)), which the trainers take too"
            )
