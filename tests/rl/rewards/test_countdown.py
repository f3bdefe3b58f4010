"""The countdown reward: a right equation of the given numbers, each used once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from archon.rl.rewards import get_reward_fn
from archon.schema.errors import RewardError

GOLD = {"target": 24, "numbers": [1, 3, 4, 6]}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<answer>6 / (1 - 3 / 4)</answer>", 1.0),
        ("<answer>1 + 1</answer> no: <answer>\n6/(1-3/4) = 24\n</answer>", 1.0),
        (r"\boxed{6 ÷ (1 - 3 ÷ 4)}", 1.0),
        ("<answer>6 * 4 * 1 - 3</answer>", 0.1),  # 21
        ("<answer>6 * 4</answer>", 0.1),  # not every number
        ("<answer>(6 - 3 + 4 + 1) * 3</answer>", 0.1),  # 3 twice
        ("<answer>6 / (4 - 3 - 1)</answer>", 0.1),  # division by 0
        ("<answer>6 ** 4 ** 3 ** 1</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>" + "(" * 900 + "</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("6 / (1 - 3 / 4)", 0.0),
    ],
)
@pytest.mark.parametrize("gold", [GOLD, json.dumps(GOLD)], ids=["dictionary", "JSON"])
def test_an_equation_scores_as_in_tinyzero(answer: str, score: float, gold: Any) -> None:
    assert get_reward_fn("countdown_reward")("", answer, [], [], answer=gold) == score


@pytest.mark.parametrize("gold", ["24", "nonsense", {"target": 24}, {"target": 24, "numbers": []}])
def test_gold_data_of_another_form_is_an_error(gold: Any) -> None:
    with pytest.raises(RewardError, match="countdown: answer is"):
        get_reward_fn("countdown")("", "<answer>1</answer>", [], [], answer=gold)
