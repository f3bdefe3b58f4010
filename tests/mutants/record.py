"""The record of planted mistakes: a row for each, and a last line that sums up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutants.mutant import Mutant
from tests.mutants.planting import Outcome

Row = dict[str, Any]


def row_of(mutant: Mutant, outcome: Outcome, commit: str) -> Row:
    """Return a mutant's row: whether its tests noticed it at `commit`, which of them, in how many seconds."""
    by = f"time-out after {outcome.seconds:.0f} s" if outcome.timed_out else outcome.failed
    found = {"mutant": mutant.name, "file": mutant.file, "patch": mutant.patch, "caught": outcome.caught, "by": by}
    return found | {"seconds": outcome.seconds, "commit": commit} | ({"error": outcome.error} if outcome.error else {})


def is_of(row: Row, mutant: Mutant) -> bool:
    """Return whether a row was found with this very edit."""
    return row["mutant"] == mutant.name and row.get("patch") == mutant.patch


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how many mutants were caught, and which were not."""
    caught = sum(row["caught"] for row in rows)
    survivors = [row["mutant"] for row in rows if not row["caught"]]
    share = round(caught / len(rows), 4) if rows else 0.0
    return {"mutants": len(rows), "caught": caught, "share": share, "survivors": survivors}


class Record:
    """The rows of a catalog's mutants in a file of JSON lines; what it holds of other edits is left out.

    Args:
        path: need not exist.
        catalog: the mutants, in the order of their rows.
        last_run: the command, commit and machine of this run, for the summary.
    """

    def __init__(self, path: Path, catalog: Sequence[Mutant], last_run: dict[str, Any]) -> None:
        self.path, self.catalog, self.last_run = path, catalog, last_run
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        read = {row["mutant"]: row for row in map(json.loads, lines) if "mutant" in row}
        self._rows = {m.name: read[m.name] for m in catalog if m.name in read and is_of(read[m.name], m)}

    @property
    def rows(self) -> list[Row]:
        """In the order of the catalog."""
        return [self._rows[mutant.name] for mutant in self.catalog if mutant.name in self._rows]

    def missing(self) -> list[Mutant]:
        """Return the mutants without a row."""
        return [mutant for mutant in self.catalog if mutant.name not in self._rows]

    def put(self, row: Row) -> None:
        """Replace a mutant's row and write the file, which is complete after each."""
        self._rows[row["mutant"]] = row
        seconds = round(sum(row["seconds"] for row in self.rows), 1)
        summary = summary_of(self.rows) | {"seconds": seconds, "last_run": self.last_run}
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in (*self.rows, {"summary": summary})]
        written = self.path.with_name(f"{self.path.name}.new")
        written.write_text("".join(lines), encoding="utf-8")
        os.replace(written, self.path)
