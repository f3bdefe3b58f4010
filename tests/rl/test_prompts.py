"""The order of prompts by a column of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from archon.rl.config import RLConfig
from archon.rl.prompts import PromptStream
from archon.rl.trainer import RLTrainer
from archon.schema.errors import DatasetError

ROWS: list[dict[str, Any]] = [{"prompt": str(n), "level": level} for n, level in enumerate([2.5, 1, 3, 1])]


def test_easy_prompts_come_first_and_every_epoch_begins_anew() -> None:
    stream = PromptStream(ROWS, 0, "level")
    taken = [prompt.row["level"] for prompt in stream.take(8)]
    assert taken == [1, 1, 2.5, 3] * 2
    nested = [{"raw_task": row} for row in ROWS]
    assert [prompt.row["raw_task"]["level"] for prompt in PromptStream(nested, 0, "level").take(4)] == [1, 1, 2.5, 3]


@pytest.mark.parametrize("level", ["hard", None, True, float("nan")])
def test_a_row_without_a_number_is_named(level: Any) -> None:
    rows = [*ROWS, {"prompt": "x", "level": level}]
    with pytest.raises(DatasetError, match=r"curriculum_column: row 4 has level=.*, expected a number.*level, prompt"):
        PromptStream(rows, 0, "level")


def rows_of_levels(split: str) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "response": str(n + 1), "level": 9 - n} for n in range(10)]


def test_a_run_takes_its_prompts_in_the_order_of_the_column(rl_config: Callable[..., RLConfig]) -> None:
    config = rl_config(train_data={"path": f"python:{__name__}.rows_of_levels"}, curriculum_column="level")
    with RLTrainer(config).opened() as trainer:
        assert [prompt.row["prompt"].strip() for prompt in trainer.prompts.take(10)] == [
            f"{n}+1=" for n in range(9, -1, -1)
        ]
