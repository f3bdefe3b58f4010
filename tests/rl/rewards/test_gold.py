"""Gold answers score 1.0 before step 0, or the run stops."""

from __future__ import annotations

from typing import Any

import pytest

from archon.data import get_arithmetic_rl_dataset
from archon.rl.rewards import AsyncRewardWrapper, averify_gold, verify_gold
from archon.schema.errors import RewardError
from tests.rl.rewards import faulty


def half(prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any) -> float:
    return 0.5 * (completions == answer)


def test_gold_answers_that_score_one_pass() -> None:
    assert verify_gold("exact_match", get_arithmetic_rl_dataset("test"), 50) == 50
    assert verify_gold("gsm8k", [{"answer": "1 + 2\n#### 3"}]) == 1


def test_a_bare_gold_answer_may_be_boxed() -> None:
    assert verify_gold("math_verify", [{"answer": r"\frac{1}{2}"}, {"answer": r"so \boxed{3}"}]) == 2


def test_gold_rows_are_spread_over_the_whole_set() -> None:
    rows = [{"answer": "3"}] * 99 + [{"answer": "many"}]
    with pytest.raises(RewardError, match=r"fails on the gold answer of row 99 \('many'\): .*must be a number"):
        verify_gold("gsm8k", rows, None)
    assert verify_gold("gsm8k", rows, 10) == 10


@pytest.mark.slow
async def test_a_gold_answer_that_scores_less_than_one_stops_the_run() -> None:
    message = r"row 0 \('3'\) scores 0.5 instead of 1.0 with the reward .*half"
    with AsyncRewardWrapper(half) as reward, pytest.raises(RewardError, match=message):
        await averify_gold(reward, [{"answer": "3"}])


def test_a_reward_that_fails_on_gold_stops_the_run() -> None:
    with pytest.raises(RewardError, match=r"fails on the gold answer of row 0 .* exited with code 3"):
        verify_gold(faulty.obey, [{"answer": "os._exit"}])


def test_rows_without_gold_answers_are_not_checked() -> None:
    assert verify_gold("gsm8k", [{"solution": "3"}, {"answer": "3"}]) == 1
    with pytest.raises(RewardError, match=r"no row has a gold `answer` .* row 0 has: \['solution'\]"):
        verify_gold("gsm8k", [{"solution": "3"}])
