"""Reward of the countdown task: an equation that reaches a target with the given numbers, each used once."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from archon.rl.rewards.extract import boxed_answer
from archon.schema.errors import RewardError

MAX_LENGTH = 1000
"""Characters of the longest equation that is read."""
FORMAT_SCORE = 0.1
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: Any, **data: Any
) -> float:
    r"""Return 1.0 for a right equation, 0.1 for another equation, and 0.0 without one.

    The equation is in the last `<answer>…</answer>`, else in the last `\boxed{…}`; text after `=` is ignored. The
    scores are the same as in TinyZero (Pan et al. 2025). The gold `answer` is a dictionary or JSON, such as
    `{"target": 24, "numbers": [1, 3, 4, 6]}`.

    Raises:
        RewardError: `answer` has another form; a defect of the data is not a reward of 0.
    """
    target, numbers = _read_gold(answer)
    tagged = _ANSWER.findall(completions)
    equation = tagged[-1] if tagged else boxed_answer(completions)
    if equation is None:
        return 0.0
    try:
        used, value = _evaluate(equation.partition("=")[0].replace("×", "*").replace("÷", "/").strip())
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return FORMAT_SCORE
    return 1.0 if sorted(used) == sorted(numbers) and value == target else FORMAT_SCORE


def _read_gold(answer: Any) -> tuple[int, list[int]]:
    try:
        gold = json.loads(answer) if isinstance(answer, str) else answer
        target, numbers = gold["target"], [*gold["numbers"]]
    except (ValueError, TypeError, KeyError):
        raise RewardError(
            f'countdown: answer is {answer!r:.80}; expected {{"target": 24, "numbers": [1, 3, 4, 6]}}'
        ) from None
    if not numbers or any(type(number) is not int for number in (target, *numbers)):
        raise RewardError(f"countdown: answer is {answer!r:.80}; expected whole numbers")
    return target, numbers


def _evaluate(equation: str) -> tuple[list[int], Fraction]:
    """Return the numbers in an equation of + - * / and parentheses, and its exact value.

    Raises:
        ValueError: another operator or operand.
    """
    if len(equation) > MAX_LENGTH:
        raise ValueError
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    return used, value(ast.parse(equation, mode="eval").body)
