"""Rewards of the built-in datasets: exact text, number, or mathematical answer in brackets."""

from __future__ import annotations

from typing import Any

from archon.rl.rewards.extract import extract_answer, gold_answer
from archon.rl.rewards.math_verify import answers_equal
from archon.rl.rewards.numbers import parse_number
from archon.rl.rewards.result import in_process
from archon.schema.errors import RewardError


@in_process
def exact_match_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    """Return 1.0 if the stripped completion is the gold answer, else 0.0."""
    return float(completions.strip() == str(answer).strip())


def gsm8k_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    r"""Return 1.0 if the last `\boxed{x}`, else the last line `#### x`, is the gold number, else 0.0.

    `####` must begin its line, in bold or not: "The answer is #### 72" states no answer. Units, currencies and mark-up
    do not matter, see `parse_number`. `answer` is a gsm8k solution that ends in `#### x`, or the bare number.

    Raises:
        RewardError: the gold answer is not a number; a defect of the data is not a reward of 0.
    """
    return _number_reward("gsm8k", completions, gold_answer(str(answer))[0], form="gsm8k")


def clevr_count_70k_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    r"""Return 1.0 if the last `\boxed{3}`, else the last `[ 3 ]` or `[3.0]`, is the gold count, else 0.0.

    Raises:
        RewardError: the gold answer is not a number.
    """
    return _number_reward("clevr_count_70k", completions, str(answer), form="brackets")


def geometry3k_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    r"""Return 1.0 if the last `\boxed{x}`, else the last `[x]`, equals the gold answer, else 0.0.

    Answers are compared as mathematics: `7 \sqrt{3}` equals 7√3.

    Raises:
        RewardError: math-verify is not installed, or the gold answer is empty.
    """
    gold, _ = gold_answer(str(answer))
    if not gold:
        raise RewardError("geometry3k's gold answer is empty")
    stated = extract_answer(completions, form="brackets")
    return float(stated is not None and answers_equal(gold, stated))


def _number_reward(dataset: str, completions: str, answer: str, form: str) -> float:
    gold = parse_number(answer)
    if gold is None:
        raise RewardError(f"{dataset}'s gold answer must be a number, got {answer!r}")
    stated = extract_answer(completions, form=form)
    return float(stated is not None and parse_number(stated) == gold)
