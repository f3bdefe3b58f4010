r"""The reward of gsm8k: 1.0 where the stated number equals the gold number exactly, else 0.0."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from archon.rl.rewards.extract import extract_answer, gold_answer, normalise_answer
from archon.schema.errors import RewardError

_DECIMAL = r"(?:[0-9]{1,3}(?:[, ][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*(?:\\?\$)?\s*(?P<value>{_DECIMAL})\s*(?:\\?%)?")
_RATIO = re.compile(r"(?P<sign>[+-]?)\s*(?:\\[dt]?frac\{(?P<a>[^{}]*)\}\{(?P<b>[^{}]*)\}|(?P<c>[^/]*)/(?P<d>[^/]*))")
_LONGEST_NUMBER = 100  # characters; beyond it an answer is noise, and int() refuses 4,300 digits


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of a written number, or None: 1,000 · 3.0 · [ 3 ] · $18 · 20% (as 20) · 7/2 · \frac{7}{2}."""
    text = normalise_answer(text.replace("\N{MINUS SIGN}", "-"))
    if len(text) > _LONGEST_NUMBER:
        return None
    plain = _NUMBER.fullmatch(text)
    if plain:
        value = Fraction(plain["value"].replace(",", "").replace(" ", ""))
        return -value if plain["sign"] == "-" else value
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    above = _NUMBER.fullmatch((ratio["a"] or ratio["c"] or "").strip())
    below = _NUMBER.fullmatch((ratio["b"] or ratio["d"] or "").strip())
    if above is None or below is None:
        return None
    divisor = parse_number(below[0])
    dividend = parse_number(above[0])
    if dividend is None or not divisor:
        return None
    value = dividend / divisor
    return -value if ratio["sign"] == "-" else value


def gsm8k_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    r"""1.0 where the completion's last `\boxed{x}`, or else its last `#### x`, is the gold number, else 0.0.

    Args:
        answer: The gold answer, as gsm8k has it (a solution that ends in `#### x`) or the bare number.

    Raises:
        RewardError: the gold answer is not a number: a defect of the data, which must not become a 0.
    """
    gold_text, _ = gold_answer(str(answer))
    gold = parse_number(gold_text)
    if gold is None:
        raise RewardError(f"gsm8k's gold answer must be a number, got {gold_text!r}")
    stated = extract_answer(completions, form="gsm8k")
    if stated is None:
        return 0.0
    return float(parse_number(stated) == gold)
