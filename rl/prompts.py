"""The prompts a run trains on, in a seeded order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archon.data import RowLoader

if TYPE_CHECKING:
    pass
if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Prompt:
    """A row of the dataset and its place in the data stream (its ordinal, which no other prompt of the run has)."""

    index: int
    row: dict[str, Any]


class PromptStream:
    """Prompts in a seeded order, epoch after epoch, each with its ordinal in the run; resumes where it stood."""

    def __init__(self, rows: Sequence[dict[str, Any]], seed: int) -> None:
        self._loader = RowLoader(rows, batch_size=1, seed=seed)
        self._again: list[int] = []  # ordinals handed out before a resume, and not trained on

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """All rows, in the dataset's order."""
        return self._loader.rows

    @property
    def taken(self) -> int:
        """Prompts handed out so far, and so the ordinal of the next one."""
        return self._loader.epoch * len(self._loader.rows) + self._loader.cursor

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        again, self._again = self._again[:n], self._again[n:]
        prompts = [Prompt(ordinal, self._loader.row_at(ordinal)) for ordinal in again]
        if n > len(again):
            first, self._loader.batch_size = self.taken, n - len(again)
            prompts += [Prompt(first + offset, row) for offset, row in enumerate(self._loader.next_batch())]
        return prompts

    def state_dict(self, ahead: Sequence[int] = ()) -> dict[str, Any]:
        """Where the stream stands. `ahead`: ordinals that were taken and not trained on; a resumed stream begins with
        them."""
        return {**self._loader.state_dict(), "again": [*ahead, *self._again]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `DatasetError` when the state is of other rows or another seed."""
        self._loader.load_state_dict(state)
        self._again = list(state["again"])
