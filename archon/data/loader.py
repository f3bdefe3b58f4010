"""Batches of rows in a shuffled order that a seed fixes and a checkpoint resumes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any, Literal

from archon.schema.errors import DatasetError

_FINGERPRINT_ROWS = 64


class RowLoader:
    """Hands out rows, each exactly once an epoch, in an order that depends on the seed and the epoch alone.

    Args:
        rows: A `RowDataset` or any sequence.
        batch_size: Rows a batch.
        seed: Of the order; epoch e of seed s is always the same permutation.
        shuffle: Without it every epoch has the order of `rows`.
        tail: What becomes of the last rows of an epoch that fill no batch: "drop" them, "keep" them as a shorter batch,
            or "wrap": fill the batch with the first rows of the next epoch, which then starts behind them.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tail: Literal["drop", "keep", "wrap"] = "wrap",
    ) -> None:
        if not rows:
            raise DatasetError("a loader needs at least one row, got an empty dataset")
        if batch_size < 1:
            raise DatasetError(f"batch_size must be at least 1, got {batch_size}")
        if tail not in ("drop", "keep", "wrap"):
            raise DatasetError(f"tail must be 'drop', 'keep' or 'wrap', got {tail!r}")
        if tail == "drop" and batch_size > len(rows):
            raise DatasetError(
                f"batch_size={batch_size} is more than the {len(rows)} rows there are, and tail='drop' would drop them "
                "all; lower batch_size or choose tail='wrap'"
            )
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.tail = tail
        self.epoch = 0
        self.cursor = 0  # rows of this epoch's order that were handed out
        self._order = self._order_of(self.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that see every row once (with "drop": every row but the dropped ones)."""
        whole, rest = divmod(len(self.rows), self.batch_size)
        return whole + (1 if rest and self.tail != "drop" else 0)

    def next_batch(self) -> list[dict[str, Any]]:
        """The next rows; a new epoch begins when this one cannot go on."""
        left = len(self.rows) - self.cursor
        if left == 0 or (left < self.batch_size and self.tail == "drop"):
            self._next_epoch()
        batch = self._take(self.batch_size)
        while len(batch) < self.batch_size and self.tail == "wrap":
            self._next_epoch()
            batch += self._take(self.batch_size - len(batch))
        return batch

    def row_at(self, ordinal: int) -> dict[str, Any]:
        """Row number `ordinal` of all that are handed out, epoch after epoch."""
        epoch, place = divmod(ordinal, len(self.rows))
        order = self._order if epoch == self.epoch else self._order_of(epoch)
        return self.rows[order[place]]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as JSON: what it takes to go on with the very next row."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": len(self.rows),
            "fingerprint": self.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
            DatasetError: the state is of another dataset, seed or order, so that rows would be repeated or left out.
        """
        mine = self.state_dict()
        for key in ("rows", "fingerprint", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise DatasetError(
                    f"cannot resume the data order: the checkpoint has {key}={state[key]!r}, this run has "
                    f"{mine[key]!r}; resume with the dataset and seed that the run began with"
                )
        self.epoch = state["epoch"]
        self.cursor = state["cursor"]
        self._order = self._order_of(self.epoch)

    def _take(self, count: int) -> list[dict[str, Any]]:
        chosen = self._order[self.cursor : self.cursor + count]
        self.cursor += len(chosen)
        return [self.rows[index] for index in chosen]

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.cursor = 0
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        if self.shuffle:
            random.Random(f"rows {self.seed} {epoch}").shuffle(order)
        return order

    def fingerprint(self) -> str:
        """Of some rows, evenly spread: enough to notice another dataset, or this one in another order."""
        count = min(_FINGERPRINT_ROWS, len(self.rows))
        sample = [self.rows[index * len(self.rows) // count] for index in range(count)]
        try:
            text = json.dumps(sample, sort_keys=True, default=repr)
        except (TypeError, ValueError, RecursionError) as error:  # keys of several types, a row within itself
            raise DatasetError(
                f"a row holds what JSON cannot: {error}; expected texts, numbers, lists and mappings"
            ) from None
        return hashlib.sha256(text.encode()).hexdigest()[:16]
