"""RowLoader: seeded order, every row exactly once an epoch, and a cursor that resumes at the very next row."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from archon.data import RowDataset, RowLoader
from archon.schema.errors import DatasetError


def rows(count: int) -> RowDataset:
    return RowDataset("numbers", [{"number": number} for number in range(count)])


def numbers(loader: RowLoader, batches: int) -> list[list[int]]:
    return [[row["number"] for row in loader.next_batch()] for _ in range(batches)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 25])
def test_every_row_comes_exactly_once_an_epoch(batch_size: int) -> None:
    loader = RowLoader(rows(10), batch_size, seed=5)
    for epoch in range(7):
        batches = numbers(loader, loader.steps_per_epoch)
        assert sorted(flat(batches)) == list(range(10))
        assert (loader.epoch, loader.cursor) == (epoch, 10)
        assert all(len(batch) == batch_size for batch in batches[:-1])


@pytest.mark.parametrize(("tail", "sizes"), [("drop", [4, 4, 4]), ("keep", [4, 4, 2]), ("wrap", [4, 4, 4])])
def test_the_tail_of_an_epoch_is_dropped_kept_or_wrapped(tail: Any, sizes: list[int]) -> None:
    loader = RowLoader(rows(10), 4, tail=tail)
    assert loader.steps_per_epoch == (2 if tail == "drop" else 3)
    batches = numbers(loader, 3)
    assert [len(batch) for batch in batches] == sizes
    assert len(set(flat(batches)[:8])) == 8
    if tail == "wrap":
        assert (loader.epoch, loader.cursor) == (1, 2)
        assert sorted(flat(batches)[:10]) == list(range(10))
    if tail == "drop":
        assert (loader.epoch, loader.cursor) == (1, 4)


def test_the_order_is_fixed_by_seed_and_epoch_alone() -> None:
    first = numbers(RowLoader(rows(50), 50, seed=1), 3)
    random.seed(99)
    assert numbers(RowLoader(rows(50), 50, seed=1), 3) == first
    assert flat(numbers(RowLoader(rows(50), 5, seed=1), 30)) == flat(first)
    assert flat(numbers(RowLoader(rows(50), 30, seed=1, tail="wrap"), 5)) == flat(first)
    assert numbers(RowLoader(rows(50), 50, seed=2), 3) != first
    assert first[0] != first[1] != list(range(50))
    assert numbers(RowLoader(rows(4), 2, shuffle=False), 3) == [[0, 1], [2, 3], [0, 1]]


def test_the_order_does_not_change_between_releases() -> None:
    assert numbers(RowLoader(rows(8), 8, seed=0), 1) == [[7, 3, 2, 1, 5, 6, 0, 4]]


@pytest.mark.parametrize("stop", range(1, 12))
@pytest.mark.parametrize("tail", ["drop", "keep", "wrap"])
def test_a_resumed_run_sees_each_row_exactly_once(stop: int, tail: Any) -> None:
    whole = numbers(RowLoader(rows(10), 3, seed=3, tail=tail), 12)
    killed = RowLoader(rows(10), 3, seed=3, tail=tail)
    before = numbers(killed, stop)
    state = json.loads(json.dumps(killed.state_dict()))
    numbers(killed, 2)  # continues after the checkpoint, and is lost
    resumed = RowLoader(rows(10), 3, seed=3, tail=tail)
    resumed.load_state_dict(state)
    assert before + numbers(resumed, 12 - stop) == whole
    assert max(Counter(flat(whole[:3])).values()) == 1


def test_another_batch_size_after_resuming_repeats_nothing() -> None:
    killed = RowLoader(rows(10), 3, seed=3)
    before = flat(numbers(killed, 2))
    resumed = RowLoader(rows(10), 2, seed=3)
    resumed.load_state_dict(killed.state_dict())
    assert sorted(before + flat(numbers(resumed, 2))) == list(range(10))


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (RowLoader(rows(9), 3, seed=3), "rows=9, this run has 10"),
        (RowLoader(rows(10), 3, seed=4), "seed=4, this run has 3"),
        (RowLoader(rows(10), 3, seed=3, shuffle=False), "shuffle=False, this run has True"),
        (RowLoader(RowDataset("n", [*rows(10)][::-1]), 3, seed=3), "fingerprint="),
    ],
)
def test_a_state_of_other_data_or_another_order_is_refused(other: RowLoader, key: str) -> None:
    with pytest.raises(DatasetError, match=f"cannot resume the data order: the checkpoint has {key}"):
        RowLoader(rows(10), 3, seed=3).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": [], "batch_size": 1}, "at least one row"),
        ({"rows": rows(3), "batch_size": 0}, "batch_size is 0; expected at least 1"),
        (
            {"rows": rows(3), "batch_size": 4, "tail": "drop"},
            "batch_size is 4 and tail is 'drop', which drops all 3 rows",
        ),
        ({"rows": rows(3), "batch_size": 1, "tail": "cut"}, "tail is 'cut'; expected 'drop', 'keep' or 'wrap'"),
    ],
)
def test_a_wrong_loader_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        RowLoader(**arguments)


def test_easy_rows_come_first_in_every_epoch_and_equal_ones_are_shuffled() -> None:
    rows = [{"level": level, "n": n} for n, level in enumerate([3, 1, 2, 1, 3, 1, 2, 1])]
    loader = RowLoader(rows, 8, seed=1, difficulty=[row["level"] for row in rows])
    epochs = [loader.next_batch() for _ in range(3)]
    for epoch in epochs:
        assert [row["level"] for row in epoch] == [1, 1, 1, 1, 2, 2, 3, 3]
        assert sorted(row["n"] for row in epoch) == list(range(8))
    assert len({tuple(row["n"] for row in epoch) for epoch in epochs}) > 1
    assert loader.row_at(8 + 4)["level"] == 2


def test_a_run_is_not_resumed_with_another_curriculum() -> None:
    rows = [{"n": n} for n in range(4)]
    state = RowLoader(rows, 2, difficulty=[1, 2, 3, 4]).state_dict()
    RowLoader(rows, 2, difficulty=[1, 2, 3, 4]).load_state_dict(state)
    for other in (None, [4, 3, 2, 1]):
        with pytest.raises(DatasetError, match="cannot resume the data order: the checkpoint has difficulty="):
            RowLoader(rows, 2, difficulty=other).load_state_dict(state)


def test_a_prompt_with_another_date_is_the_same_data_and_another_answer_is_not() -> None:
    def row(date: int, answer: int) -> dict[str, list[int]]:
        return {"input_ids": [date, 7, answer], "loss_mask": [0, 0, 1]}

    def pair(date: int, rejected: int) -> dict[str, list[int]]:
        mask = {"chosen_loss_mask": [0, 1], "rejected_loss_mask": [0, 1]}
        return {"chosen_ids": [date, 5], "rejected_ids": [date, rejected], **mask}

    for encode in (row, pair):
        fingerprint = RowLoader([encode(1, 8)], 1).fingerprint()
        assert RowLoader([encode(2, 8)], 1).fingerprint() == fingerprint
        assert RowLoader([encode(1, 9)], 1).fingerprint() != fingerprint
