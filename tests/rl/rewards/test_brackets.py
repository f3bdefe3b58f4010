r"""geometry3k and clevr_count_70k: where their answer stands, and what equals it."""

from __future__ import annotations

import pytest

from archon.rl.rewards import get_reward_fn
from archon.schema.errors import RewardError


def score(name: str, completion: str, answer: str) -> float:
    found: float = get_reward_fn(name)(None, completion, None, None, answer=answer)
    return found


@pytest.mark.parametrize("stated", ["[ 3 ]", "[3.0]", r"\boxed{3}", "I count [2], no, [3]", r"[5], so \boxed{ [3] }"])
def test_clevr_finds_the_stated_count(stated: str) -> None:
    assert score("clevr_count_70k", stated, "3") == 1.0


@pytest.mark.parametrize(
    "stated", ["3", "there are 3", "[2]", "[3, 4]", "[]", "[ ]", r"[3] but \boxed{4}", "[13]", "["]
)
def test_clevr_pays_for_nothing_else(stated: str) -> None:
    assert score("clevr_count_70k", stated, "3") == 0.0


def test_clevr_refuses_a_gold_answer_that_is_no_number() -> None:
    with pytest.raises(RewardError, match="gold answer must be a number, got 'three'"):
        score("clevr_count_70k", "[3]", "three")


@pytest.mark.parametrize(
    ("stated", "gold"),
    [
        ("[7√3]", r"7 \sqrt { 3 }"),
        (r"\boxed{7\sqrt{3}}", "7√3"),
        ("so x = [3.5]", "7/2"),
        (r"[\frac{7}{2}]", "7/2"),
        ("[ 3 ]", "3"),
    ],
)
def test_geometry3k_compares_as_mathematics(stated: str, gold: str) -> None:
    assert score("geometry3k", stated, gold) == 1.0


@pytest.mark.parametrize(
    ("stated", "gold"), [("[7√3]", "10√3"), ("[7/2]", "1/2"), ("7√3", "7√3"), ("the answer is 3", "3"), ("[30]", "3")]
)
def test_geometry3k_does_not_match_a_part_or_a_number_in_passing(stated: str, gold: str) -> None:
    assert score("geometry3k", stated, gold) == 0.0


def test_geometry3k_refuses_an_empty_gold_answer() -> None:
    with pytest.raises(RewardError, match="gold answer is empty"):
        score("geometry3k", "[3]", " ")
