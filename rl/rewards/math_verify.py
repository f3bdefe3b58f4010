"""Reward for free-form mathematics, by math-verify.

math-verify's time-outs are off (SIGALRM fails outside the main thread); `AsyncRewardWrapper` enforces the time limit.
The shared extractor finds the answer, not math-verify's search in running text.
"""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

from archon.rl.rewards.extract import extract_answer, gold_answer, normalize_answer
from archon.rl.rewards.numbers import parse_number
from archon.schema.errors import RewardError

_UNICODE = {
    "\N{MINUS SIGN}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{DIVISION SIGN}": "/",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{INFINITY}": r"\infty ",
    "\N{DEGREE SIGN}": r"^\circ ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
}
_ROOT = re.compile(r"\N{SQUARE ROOT}\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9.]+|[A-Za-z]))")
_SPACED_THOUSANDS = re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9]))")
_WORDS = re.compile(r"(?:\\text\s*\{\s*)?([A-Za-z]{3,}(?:[ '-][A-Za-z]+)*)\s*\}?")
_SCALES = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen)(?=s?\b)")


@functools.cache
def _library() -> SimpleNamespace:
    try:
        from math_verify import LatexExtractionConfig, grader, parse, parser, verify
    except ImportError as error:
        raise RewardError(
            "the reward math_verify needs the package math-verify, which is not installed; "
            "install archon's extra `rl`: pip install 'archon-engine[rl]'"
        ) from error
    # Both modules warn once that time-outs are off; this is intended.
    parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True
    boxed_only = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    return SimpleNamespace(parse=parse, verify=verify, config=boxed_only)


def _to_latex(answer: str) -> str:
    text = normalize_answer(answer)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text)
    for character, latex in _UNICODE.items():
        text = text.replace(character, latex)
    return _SPACED_THOUSANDS.sub("", text)


@functools.lru_cache(maxsize=1024)
def _parse(latex: str) -> tuple[Any, ...]:
    library = _library()
    return tuple(
        library.parse(
            rf"\boxed{{{latex}}}",
            extraction_config=library.config,
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )
    )


@functools.lru_cache(maxsize=1024)  # the samples of one prompt often agree
def answers_equal(gold: str, stated: str) -> bool:
    r"""Return whether two answers are equal: 7/2 and 3.5, `\frac12` and 0.5, [ 3 ] and 3.0, √12 and 2√3.

    Words ("yes", "Tuesday") are compared as words, ignoring case: as mathematics they are products of letters, and
    "god" would equal "dog". Answers that math-verify cannot parse are compared as text. An undefined gold answer (1/0)
    raises math-verify's error.
    """
    gold_latex, stated_latex = _to_latex(gold), _to_latex(stated)
    if gold_latex == stated_latex:
        return True
    if set(_SCALES.findall(gold.casefold())) != set(_SCALES.findall(stated.casefold())):
        return False  # math-verify ignores words in \text
    gold_words, stated_words = _WORDS.fullmatch(gold_latex), _WORDS.fullmatch(stated_latex)
    if gold_words or stated_words:
        return bool(gold_words and stated_words and gold_words[1].casefold() == stated_words[1].casefold())
    gold_values, stated_values = _parse(gold_latex), _parse(stated_latex)
    if not gold_values or not stated_values:
        return False
    return bool(_library().verify(list(gold_values), list(stated_values), timeout_seconds=None, raise_on_error=True))


def math_verify_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    r"""Return 1.0 if the completion's last `\boxed{x}` equals the gold answer as mathematics, else 0.0.

    If the gold answer uses a dataset's form (`#### 72`), the completion may use it too.

    Raises:
        RewardError: math-verify is not installed, or the gold answer is empty.
    """
    _library()
    gold, form = gold_answer(str(answer))
    if not gold:
        raise RewardError("the gold answer is empty; math_verify needs one to compare with")
    stated = extract_answer(completions, form=form)
    if stated is None:
        return 0.0
    if form == "gsm8k" and (number := parse_number(gold)) is not None and parse_number(stated) == number:
        return 1.0  # with a unit, which mathematics would take for a product
    return float(answers_equal(gold, stated))
