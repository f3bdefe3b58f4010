"""Batches of rows in an order that is determined by a seed, with a state for checkpoints."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Any, Literal

from archon.data.rows import row_fingerprint
from archon.schema.errors import DatasetError

_MASKS = {"loss_mask": "input_ids", "chosen_loss_mask": "chosen_ids", "rejected_loss_mask": "rejected_ids"}


class RowLoader:
    """Loader of batches of rows, each row exactly once per epoch, in an order determined by seed and epoch.

    Args:
        rows: a `RowDataset` or any sequence.
        batch_size: rows per batch.
        seed: seed of the order; epoch e of seed s is always the same permutation.
        shuffle: if False, every epoch has the order of `rows`.
        difficulty: a number for each row; every epoch starts with the easiest rows, and `shuffle` orders rows of equal
            difficulty (curriculum sampling: Kimi k1.5, arXiv 2501.12599, section 2.3.4).
        tail: for the last rows of an epoch, if they are fewer than a batch: "keep" them as a shorter batch, "drop"
            them, or "wrap": complete the batch with the first rows of the next epoch.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        difficulty: Sequence[float] | None = None,
        tail: Literal["drop", "keep", "wrap"] = "keep",
    ) -> None:
        if not rows:
            raise DatasetError("the dataset is empty; expected at least one row")
        if batch_size < 1:
            raise DatasetError(f"batch_size is {batch_size}; expected at least 1")
        if tail not in ("drop", "keep", "wrap"):
            raise DatasetError(f"tail is {tail!r}; expected 'drop', 'keep' or 'wrap'")
        if tail == "drop" and batch_size > len(rows):
            raise DatasetError(
                f"batch_size is {batch_size} and tail is 'drop', which drops all {len(rows)} rows of the dataset; "
                "lower batch_size or choose tail='keep'"
            )
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.difficulty = difficulty
        self.tail = tail
        self.epoch = 0
        self.cursor = 0  # number of this epoch's rows that have been returned
        self._order = self._epoch_order(self.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches that contain every row once; with "drop", every row that is not dropped."""
        full, remainder = divmod(len(self.rows), self.batch_size)
        return full + (1 if remainder and self.tail != "drop" else 0)

    @property
    def steps_taken(self) -> int:
        """Number of batches of this size before the position, unless `tail` is "wrap"."""
        return self.epoch * self.steps_per_epoch + math.ceil(self.cursor / self.batch_size)

    def next_batch(self) -> list[dict[str, Any]]:
        """Return the next batch; start a new epoch after the last batch."""
        left = len(self.rows) - self.cursor
        if left == 0 or (left < self.batch_size and self.tail == "drop"):
            self._next_epoch()
        batch = self._take(self.batch_size)
        while len(batch) < self.batch_size and self.tail == "wrap":
            self._next_epoch()
            batch += self._take(self.batch_size - len(batch))
        return batch

    def row_at(self, ordinal: int) -> dict[str, Any]:
        """Return row number `ordinal` of the loader's order, counted over all epochs from 0."""
        epoch, place = divmod(ordinal, len(self.rows))
        order = self._order if epoch == self.epoch else self._epoch_order(epoch)
        return self.rows[order[place]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data; a loader with this state continues with the next row."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": len(self.rows),
            "fingerprint": self.fingerprint(),
            "difficulty": self.difficulty and hashlib.sha256(repr(list(self.difficulty)).encode()).hexdigest()[:16],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            DatasetError: the state is of another dataset, seed or order, so that rows would be repeated or skipped.
        """
        current = self.state_dict()
        for key in ("rows", "fingerprint", "seed", "shuffle", "difficulty"):
            if state.get(key) != current[key]:
                raise DatasetError(
                    f"cannot resume the data order: the checkpoint has {key}={state.get(key)!r}, this run has "
                    f"{current[key]!r}; resume with the dataset and seed with which the run began"
                )
        self.epoch = state["epoch"]
        self.cursor = state["cursor"]
        self._order = self._epoch_order(self.epoch)

    def _take(self, count: int) -> list[dict[str, Any]]:
        chosen = self._order[self.cursor : self.cursor + count]
        self.cursor += len(chosen)
        return [self.rows[index] for index in chosen]

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.cursor = 0
        self._order = self._epoch_order(self.epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        if self.shuffle:
            random.Random(f"rows {self.seed} {epoch}").shuffle(order)
        if self.difficulty is not None:
            order.sort(key=self.difficulty.__getitem__)
        return order

    def fingerprint(self) -> str:
        """Return a hash that detects another dataset or another order of its rows.

        Encoded rows count with their trained tokens, because a chat template can write today's date into a prompt.
        Prompts are compared by the fingerprint of the source, which a `RowDataset` has.
        """
        source = getattr(self.rows, "source_fingerprint", None)
        return row_fingerprint([source, row_fingerprint(self.rows, key=_trained_tokens)])


def _trained_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """Return the trained tokens of an encoded row by the name of their column; other rows are returned unchanged."""
    return {
        ids: [token for token, trained in zip(row[ids], row[mask], strict=True) if trained]
        for mask, ids in _MASKS.items()
        if mask in row and ids in row
    } or row
