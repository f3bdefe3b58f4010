"""The data of the recipes with SmolLM2: held out is held out, and what is right earns the reward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from archon.rl.environments import reasoning_gym
from archon.rl.recipes import sums, worked


def test_no_sum_is_trained_on_that_is_held_out() -> None:
    def asked(split: str) -> set[frozenset[str]]:
        rows = sums.rows(split)
        last = [[m for m in row["prompt"] if m["role"] == "user"][-1]["content"] for row in rows]
        return {frozenset(text.removeprefix("What is ").removesuffix("?").split(" + ")) for text in last}

    for kind in ("", "sft", "pairs"):
        train, test = asked(kind or "train"), asked(f"{kind}_test" if kind else "test")
        assert len(test) > 90 and len(train) > 3000 and not train & test


def test_rewarded_preferred_and_imitated_answers_are_the_right_ones() -> None:
    row, pair, conversation = sums.rows("train")[7], sums.rows("pairs")[7], sums.rows("sft")[7]
    terms, value = row["answer"].split(" = ")
    assert sum(map(int, terms.split(" + "))) == int(value)
    assert pair["chosen"] == row["answer"] != pair["rejected"]
    assert pair["prompt"] == row["prompt"] == conversation["prompt"][:-1]
    assert conversation["prompt"][-1] == {"role": "assistant", "content": row["answer"]}


@pytest.mark.parametrize("task", [worked.letter_counting, worked.syllogism])
def test_no_row_asks_what_is_worked_or_held_out(task: Any) -> None:
    train, test = task("train"), task("test")
    (shown,) = {str(row["prompt"][:-1]) for row in [*train, *test]}
    trained, held_out = ({row["prompt"][-1]["content"] for row in rows} for rows in (train, test))
    assert len(train) == worked.TRAINED and len(test) == worked.HELD_OUT and not trained & held_out
    assert not any(question in shown for question in trained | held_out)
    first, second = (message["content"] for message in train[0]["prompt"] if message["role"] == "assistant")
    assert first != second
    row = test[0]
    given = {name: row[name] for name in ("environment", "entry")}
    for answer, earned in ((row["response"], 1.0), ("I do not know", 0.0)):
        assert reasoning_gym.score("", None, answer, None, None, **given) == earned


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_count_of_letters_is_the_answer_of_more_than_about_a_third(split: str) -> None:
    answers = Counter(row["response"] for row in worked.letter_counting(split))
    assert max(answers.values()) / answers.total() < 0.35 and len(answers) > 3
