r"""Rewards of the sets whose prompts ask for the answer in brackets: the last `\boxed{x}`, or else the last `[x]`."""

from __future__ import annotations

from typing import Any

from archon.rl.rewards.extract import extract_answer, gold_answer
from archon.rl.rewards.gsm8k import parse_number
from archon.rl.rewards.math_verify import answers_equal
from archon.schema.errors import RewardError


def geometry3k_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    r"""1.0 where the stated answer equals the gold one as mathematics (`7 \sqrt{3}`, 7√3), else 0.0.

    Raises:
        RewardError: math-verify is not installed, or the gold answer is empty.
    """
    gold, _ = gold_answer(str(answer))
    if not gold:
        raise RewardError("geometry3k's gold answer is empty")
    stated = extract_answer(completions, form="brackets")
    return float(stated is not None and answers_equal(gold, stated))


def clevr_count_70k_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    r"""1.0 where the stated number equals the gold count exactly (`[ 3 ]`, `[3.0]`, `\boxed{3}`), else 0.0.

    Raises:
        RewardError: the gold answer is not a number.
    """
    gold = parse_number(str(answer))
    if gold is None:
        raise RewardError(f"clevr_count_70k's gold answer must be a number, got {str(answer)!r}")
    stated = extract_answer(completions, form="brackets")
    return float(stated is not None and parse_number(stated) == gold)
