"""Training prompts of a run in a seeded order."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from archon.data import RowLoader
from archon.schema.errors import DatasetError


@dataclass(frozen=True)
class Prompt:
    """Dataset row and its ordinal in the data stream, unique in the run."""

    index: int
    row: dict[str, Any]


class PromptStream:
    """Resumable stream of prompts in a seeded order, epoch after epoch.

    Args:
        rows: dataset rows.
        seed: seeds the order.
        curriculum_column: difficulty column; each epoch begins with the smallest values.

    Raises:
        DatasetError: a row has no finite number in `curriculum_column`.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], seed: int, curriculum_column: str | None = None) -> None:
        difficulty = (
            None
            if curriculum_column is None
            else [_number(row, index, curriculum_column) for index, row in enumerate(rows)]
        )
        self._loader = RowLoader(rows, batch_size=1, seed=seed, difficulty=difficulty, tail="wrap")
        self._untrained: list[int] = []  # ordinals taken before a resume but not trained

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """All rows in dataset order."""
        return self._loader.rows

    @property
    def taken(self) -> int:
        """Number of prompts taken, equal to the ordinal of the next prompt."""
        return self._loader.epoch * len(self._loader.rows) + self._loader.cursor

    def at(self, ordinal: int) -> Prompt:
        """Return the prompt of an ordinal, taken or not."""
        return Prompt(ordinal, self._loader.row_at(ordinal))

    def take(self, n: int) -> list[Prompt]:
        """Return the next n prompts."""
        repeated, self._untrained = self._untrained[:n], self._untrained[n:]
        prompts = [self.at(ordinal) for ordinal in repeated]
        if n > len(repeated):
            first, self._loader.batch_size = self.taken, n - len(repeated)
            prompts += [Prompt(first + offset, row) for offset, row in enumerate(self._loader.next_batch())]
        return prompts

    def state_dict(self, untrained: Sequence[int] = ()) -> dict[str, Any]:
        """Return the position; a resumed stream first repeats the `untrained` prompts."""
        return {**self._loader.state_dict(), "again": [*untrained, *self._untrained]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position; raise `DatasetError` for other rows or another seed."""
        self._loader.load_state_dict(state)
        self._untrained = list(state["again"])


def require_environments(rows: Sequence[dict[str, Any]], names: Collection[str]) -> None:
    """Raise `DatasetError` unless every row's column `environment` is one of `names`, and each name has a row."""
    for index, row in enumerate(rows):
        if (name := row.get("environment")) not in names:
            raise DatasetError(
                f"row {index} has environment={name!r:.80}, expected a name in `environments`: {', '.join(names)}"
            )
    if absent := [name for name in names if all(row["environment"] != name for row in rows)]:
        raise DatasetError(f"environments.{absent[0]}: no row of train_data has this environment; remove it")


def _number(row: dict[str, Any], index: int, column: str) -> float:
    # With `raw` data, `raw_task` holds the source dataset's row.
    value = row.get(column, (row.get("raw_task") or {}).get(column))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DatasetError(
            f"curriculum_column: row {index} has {column}={value!r}, expected a number, smaller for easier rows; "
            f"it has the columns {', '.join(sorted(row))}"
        )
    return float(value)
