"""Handling of rows that cannot be used, by an error or by skipping and counting, and counts of notes on used rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from archon.data.sources import SourceRow
from archon.schema.errors import DatasetError, ImageError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Policy = Literal["refuse", "skip"]
Notes: TypeAlias = "Counter[tuple[str, str]]"
"""Number of rows by kind and text of a note, which tells a user what may be unexpected in the rows."""

_ERRORS = (DatasetError, ImageError)
_SHOWN = 3  # reasons in the report


@dataclass
class BadRows:
    """Converter of rows that raises or counts the errors of rows that cannot be used.

    Attributes:
        policy: "refuse" raises the error of the first such row; "skip" leaves all of them out.
        errors: location of every skipped row, and the error without it.
        notes: notes on the used rows.
    """

    policy: Policy = "refuse"
    errors: list[tuple[str, str]] = field(default_factory=list)
    notes: Notes = field(default_factory=Counter)

    def convert(
        self, rows: Sequence[SourceRow], function: Callable[[Sequence[SourceRow], Notes], list[Item]]
    ) -> list[Item]:
        """Return `function(rows, notes)`. If it raises and the policy is "skip", call it for each row alone."""
        rows, notes = [*rows], Counter[tuple[str, str]]()  # files are parsed here: their errors end the run
        try:
            converted = function(rows, notes)
            self.notes += notes
            return converted
        except _ERRORS as error:
            if self.policy == "refuse":
                hint = "; to leave such rows out, set bad_rows to skip" if len(rows) > 1 else ""
                raise type(error)(f"{error}{hint}") from error
        converted = []
        for row in rows:
            notes = Counter()
            try:
                converted += function([row], notes)
                self.notes += notes
            except _ERRORS as error:
                self.errors.append((row.where, str(error).removeprefix(f"{row.where}: ")))
        return converted

    def report(self, name: str, converted: Sequence[Any]) -> None:
        """Log the number of skipped rows, with the most frequent errors and their counts.

        Raises:
            DatasetError: all rows were skipped.
        """
        if not self.errors:
            return
        skipped, total = len(self.errors), len(converted) + len(self.errors)
        if not converted:
            where, error = self.errors[0]
            raise DatasetError(f"{name}: none of the {total} rows can be used; the first is {where}: {error}")
        first: dict[str, str] = {}
        for where, error in self.errors:
            first.setdefault(error, where)
        counts = Counter(error for _, error in self.errors).most_common()
        reasons = [f"{count}: {error} (first {first[error]})" for error, count in counts[:_SHOWN]]
        if len(counts) > _SHOWN:
            reasons.append(f"{sum(count for _, count in counts[_SHOWN:])}: other reasons")
        logger.warning("%s: skipped %d of %d rows that cannot be used: %s", name, skipped, total, " | ".join(reasons))
