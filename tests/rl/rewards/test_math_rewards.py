r"""gsm8k, math_verify and exact_match: what equals what, and that a defect never becomes a 0."""

from __future__ import annotations

import asyncio
import json
import threading
from fractions import Fraction
from pathlib import Path

import pytest

from archon.data import get_gsm8k_rl_dataset
from archon.rl.rewards import AsyncRewardWrapper, averify_gold, get_reward_fn, gold_answer
from archon.rl.rewards.datasets import gsm8k_reward
from archon.rl.rewards.math_verify import _parse, answers_equal, math_verify_reward
from archon.rl.rewards.numbers import parse_number
from archon.schema.errors import RewardError

EQUAL = [
    ("3", "[ 3 ]"),
    ("3", "[3.0]"),
    ("3", "3.0"),
    ("1,000", "1000"),
    ("1000", r"1\,000"),
    ("1000", "1{,}000"),
    ("18", r"\$18"),
    ("20", r"20\%"),
    ("7/2", "3.5"),
    (r"\frac{7}{2}", "7/2"),
    ("-3", "\N{MINUS SIGN}3"),
    ("5", "5."),
]
EQUAL_AS_MATHEMATICS = [
    ("7√3", r"7\sqrt{3}"),
    ("√12", "2√3"),
    (r"\frac{\pi}{2}", "π/2"),
    (r"\frac12", "0.5"),
    ("x - y", "-y + x"),
    ("(3,4)", r"\left(3,4\right)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1000000", "10^6"),
    (r"\text{yes}", "Yes"),
    ("2", "x=2"),
]
DIFFERENT = [
    ("7√3", "10√3"),
    (r"7\sqrt{3}", r"10\sqrt{3}"),
    ("7/2", "1/2"),
    ("3", "4"),
    ("3", "13"),
    ("3", "1 3"),
    ("3", ""),
    ("3", "1/0"),
    ("3", "(("),
    ("3", r"\frac{3}{"),
    ("god", "dog"),
    ("72", r"72\text{ thousand}"),
    ("72", r"72 \text{ Million dollars}"),
    (r"72 \text{ thousand}", r"72 \text{ million}"),
]


# Right answers of gsm8k: the question has the unit.
WITH_UNITS = [
    *("72 dollars", "72 clips", "72 cm", "72cm", "72 g", "$72", r"\$72", "72$", "€72", "$ 72 per week", "$72/hour"),
    *(
        "72 km/h",
        "72 square feet",
        "72 sq. ft.",
        "72 cm^2",
        "72 m²",
        "72 percent",
        "72 %",
        "72°F",
        "72 pieces of candy",
    ),
    *("72 miles a day", "72 years-old", "72 people's votes", "**72**", "**72 dollars**", "*72*", "__72__", "`72`"),
    *("**$72.00**", "72.", "72.00", "x = 72", "x=72", "Answer: 72", "**Answer:** 72", "Total cost = $72", "$72$"),
    *(r"$\$72$", r"$72\text{ dollars}$", r"72 \text{ apples}", r"72\text{ dollars}", r"\text{72}", r"\mathbf{72}"),
    *(r"\textbf{72}", r"\text{72 apples}", r"\text{Total} = 72", r"\textbf{\text{72}}", r"72^\circ", r"72^{\circ}"),
    *(
        r"72 \, \text{km/h}",
        r"72\ \text{cm}^2",
        r"72\%",
        r"\(72\)",
        r"\(72\) dollars",
        r"72\quad\text{miles}",
        r"7.2 \times 10^1",
    ),
    *(r"71\frac{2}{2}", "144/2 dollars", r"\frac{144}{2} \text{ dollars}", "71 1/1", "0.72 × 10^{2}", "72/1"),
]
# Not 72, or not clearly.
NOT_72 = [
    *("72 thousand", "72 million dollars", "72 dozen", "72 hundredths", "72k", "72 K", "$72m", "72 pairs", "72 halves"),
    *("72 or 73", "72 and a half", "72 to 80", "71 to 72", "72 dollars and 50 cents", "72 point five", "72 twenty"),
    *("72 x", "72x", "72 squared", "72^2", "72^{10}", "72!", "72 minus 2", "-72", "- 72", "72 - 2", "70 + 2 = 73"),
    *("not 72", "no 72 here", "72 is wrong", "about 72", "72 below zero", "72 pi", r"72\pi", r"72\sqrt{2}", "72 ab2"),
    *("72, 73", "72; 73", "(72)(2)", "7 2", "072.1", "1/72", "72/0", "72.5", "0.72", "7.2", "720", "1,72", "72,0"),
    *(r"\text{72 or 73}", r"72\text{ thousand}", r"7\text{2}", r"7.2 \times 10^2", r"72\frac{1}{2}", "x = 70 = 72"),
    *("10 = 72", "x + 1 = 72", "x = 7 72", "**72** **73**", "72e1", "٧٢", "seventy-two", "dollars", "%", "$", "", "."),
]


@pytest.mark.parametrize("stated", WITH_UNITS)
def test_units_and_mark_up_do_not_matter_in_gsm8k(stated: str) -> None:
    for completion in (f"so \\boxed{{{stated}}}", f"so\n#### {stated}", f"so\n**#### {stated}**\nDone."):
        assert gsm8k_reward("", completion, [], [], answer="72") == 1.0
        assert gsm8k_reward("", completion, [], [], answer="73") == 0.0
        assert math_verify_reward("", completion, [], [], answer="half\n#### 72") == 1.0
        assert math_verify_reward("", completion, [], [], answer="half\n#### 73") == 0.0


@pytest.mark.parametrize("stated", NOT_72)
def test_no_other_number_is_paid_for_its_digits(stated: str) -> None:
    for completion in (f"so \\boxed{{{stated}}}", f"so\n#### {stated}", f"so\n**#### {stated}**"):
        assert gsm8k_reward("", completion, [], [], answer="72") == 0.0


@pytest.mark.parametrize(("gold", "stated"), EQUAL)
def test_gsm8k_pays_for_the_same_number_written_otherwise(gold: str, stated: str) -> None:
    assert gsm8k_reward("", f"so \\boxed{{{stated}}}", [], [], answer=gold) == 1.0
    assert gsm8k_reward("", f"so\n#### {stated}", [], [], answer=f"thus\n#### {gold}") == 1.0


@pytest.mark.parametrize(("gold", "stated"), EQUAL + EQUAL_AS_MATHEMATICS)
def test_math_verify_pays_for_equal_answers(gold: str, stated: str) -> None:
    assert math_verify_reward("", f"so \\boxed{{{stated}}}", [], [], answer=gold) == 1.0


@pytest.mark.parametrize(("gold", "stated"), DIFFERENT)
def test_seven_roots_of_three_are_not_ten_roots_of_three(gold: str, stated: str) -> None:
    assert math_verify_reward("", f"so \\boxed{{{stated}}}", [], [], answer=gold) == 0.0
    if parse_number(gold) is not None:
        assert gsm8k_reward("", f"so \\boxed{{{stated}}}", [], [], answer=gold) == 0.0


@pytest.mark.parametrize("reward", [gsm8k_reward, math_verify_reward])
@pytest.mark.parametrize("completion", ["72", "The answer is 72", "#### 73\nor 72", r"\boxed{72", r"\boxed{} 72", ""])
def test_an_answer_that_is_not_stated_scores_nothing(reward, completion: str) -> None:
    assert reward("", completion, [], [], answer="half of 144\n#### 72") == 0.0


def test_math_verify_accepts_the_datasets_form_only_where_the_gold_answer_has_it() -> None:
    assert math_verify_reward("", "#### 72", [], [], answer="half of 144\n#### 72") == 1.0
    assert math_verify_reward("", "#### 72", [], [], answer="72") == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [("-1,234.50", Fraction(-2469, 2)), (".5", Fraction(1, 2)), (r"-\frac{1}{3}", Fraction(-1, 3)), ("- 5", -5)],
)
def test_numbers_are_read_exactly(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "-", "1/0", "1/2/3", "12,34", "[1,2]", "three", "9" * 5000, "٣"])
def test_what_is_no_number_is_none_and_no_crash(text: str) -> None:
    assert parse_number(text) is None


def test_a_defective_gold_answer_is_an_error_and_never_a_silent_zero() -> None:
    with pytest.raises(RewardError, match="gold answer must be a number, got 'many'"):
        gsm8k_reward("", r"\boxed{3}", [], [], answer="many")
    with pytest.raises(RewardError, match="gold answer is empty"):
        math_verify_reward("", r"\boxed{3}", [], [], answer=" ")


def test_exact_match_wants_the_exact_text() -> None:
    reward = get_reward_fn("exact_match")
    assert reward("12+34=", " 46\n", [], [], answer="46") == 1.0
    assert [reward("12+34=", text, [], [], answer="46") for text in ("", "4", "046", "46.0", "46 46")] == [0.0] * 5


def test_math_verify_scores_outside_the_main_thread() -> None:
    """math-verify's own time-outs use SIGALRM, which fails there; elsewhere that made every reward 0."""
    answers_equal.cache_clear()
    _parse.cache_clear()
    scores: list[float] = []
    direct = threading.Thread(
        target=lambda: scores.append(math_verify_reward("", r"\boxed{2\sqrt{3}}", [], [], answer="√12"))
    )
    direct.start()
    direct.join()

    async def score() -> float:
        with AsyncRewardWrapper("math_verify", max_workers=1) as reward:
            return await reward("", r"\boxed{\frac{6}{4}}", [], [], answer="1.5")

    wrapped = threading.Thread(target=lambda: scores.append(asyncio.run(score())))
    wrapped.start()
    wrapped.join()
    assert scores == [1.0, 1.0]


@pytest.mark.data
@pytest.mark.parametrize("name", ["gsm8k", "math_verify"])
async def test_all_1319_gold_answers_of_gsm8k_score_one(name: str, data_dir: Path) -> None:
    rows = get_gsm8k_rl_dataset(data_dir / "gsm8k", "test")
    with AsyncRewardWrapper(name) as reward:
        assert await averify_gold(reward, rows, None) == 1319
    for row in rows:
        solution, number = row["answer"], gold_answer(row["answer"])[0]
        assert get_reward_fn(name)("", solution, [], [], answer=solution) == 1.0
        # Written otherwise, so that math-verify has to compare: 72.0 in a box against #### 72.
        assert get_reward_fn(name)("", f"\\boxed{{{number}.0}}", [], [], answer=solution) == 1.0, solution
        assert get_reward_fn(name)("", f"\\boxed{{{number}1}}", [], [], answer=solution) == 0.0, solution


@pytest.mark.data
def test_the_gold_file_is_the_public_one(data_dir: Path) -> None:
    lines = (data_dir / "gsm8k" / "test.jsonl").read_text().splitlines()
    assert len(lines) == 1319
    assert all(set(json.loads(line)) == {"question", "answer"} for line in lines)


def test_equality_is_of_values_and_not_of_letters_without_order() -> None:
    assert answers_equal("Tuesday", "tuesday")
    assert not answers_equal("Tuesday", "Thursday")
