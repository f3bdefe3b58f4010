"""The prompts a run trains on, in a seeded order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from archon.data import RowLoader
from archon.schema.errors import DatasetError


@dataclass(frozen=True)
class Prompt:
    """A row of the dataset and its ordinal in the data stream, which is unique in the run."""

    index: int
    row: dict[str, Any]


class PromptStream:
    """Prompts in a seeded order, epoch after epoch, with their ordinals; it can be resumed.

    Args:
        rows: of the dataset.
        seed: of the order.
        curriculum_column: a column of numbers; each epoch begins with the rows of the smallest, the easiest.

    Raises `DatasetError` for a row without such a number.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], seed: int, curriculum_column: str | None = None) -> None:
        difficulty = (
            None
            if curriculum_column is None
            else [_number(row, index, curriculum_column) for index, row in enumerate(rows)]
        )
        self._loader = RowLoader(rows, batch_size=1, seed=seed, difficulty=difficulty)
        self._untrained: list[int] = []  # ordinals taken before a resume and not trained on

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """All rows, in the dataset's order."""
        return self._loader.rows

    @property
    def taken(self) -> int:
        """The number of prompts taken so far, which is the ordinal of the next one."""
        return self._loader.epoch * len(self._loader.rows) + self._loader.cursor

    def at(self, ordinal: int) -> Prompt:
        """Return the prompt of an ordinal, whether it was taken or not."""
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
        """Return the position; a resumed stream first repeats the ordinals `untrained`, which were taken."""
        return {**self._loader.state_dict(), "again": [*untrained, *self._untrained]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise `DatasetError` where the state is of other rows or another seed."""
        self._loader.load_state_dict(state)
        self._untrained = list(state["again"])


def _number(row: dict[str, Any], index: int, column: str) -> float:
    # A Trinity-style workflow's row holds the source's own under `raw_task`.
    value = row.get(column, (row.get("raw_task") or {}).get(column))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DatasetError(
            f"curriculum_column: row {index} has {column}={value!r}, expected a number, smaller for easier rows; "
            f"it has the columns {', '.join(sorted(row))}"
        )
    return float(value)
