r"""The shared answer extractor: last \boxed{}, then the data set's own form, then nothing."""

from __future__ import annotations

import pytest

from archon.rl.rewards import boxed_answer, extract_answer, gold_answer, normalize_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{7}{2}}", r"\frac{7}{2}"),
        (r"\boxed{\sqrt{\frac{1}{\sqrt{2}}}}.", r"\sqrt{\frac{1}{\sqrt{2}}}"),
        (r"\boxed {3}", "3"),
        (r"\boxed{ [ 3 ] }", "[ 3 ]"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{}", ""),
    ],
)
def test_last_box_with_nested_braces_is_the_answer(text: str, answer: str) -> None:
    assert boxed_answer(text) == answer
    assert extract_answer(text, form="gsm8k") == answer


@pytest.mark.parametrize("text", ["", "the answer is 42", r"\boxed{1} and then \boxed{2", r"boxed{3}"])
def test_a_text_without_a_finished_box_has_no_answer(text: str) -> None:
    assert boxed_answer(text) is None


@pytest.mark.parametrize("text", ["12 apples and 30 pears are 42", "The answer is 42.", "#42", "a #### 42", "72"])
def test_the_last_number_in_the_text_is_never_the_answer(text: str) -> None:
    assert extract_answer(text, form="gsm8k") is None


def test_the_datasets_own_form_counts_only_where_it_is_asked_for_and_below_a_box() -> None:
    text = "3 + 4 = 7\n#### 7"
    assert extract_answer(text, form="gsm8k") == "7"
    assert extract_answer(text) is None
    assert extract_answer(r"#### 7 or rather \boxed{8}", form="gsm8k") == "8"
    assert extract_answer("#### 1\nno\n####  2 \nthat is it", form="gsm8k") == "2"


def test_gold_answers_are_taken_out_of_worked_solutions() -> None:
    assert gold_answer("half of 144\n#### 72") == ("72", "gsm8k")
    assert gold_answer(r"thus \boxed{\frac12}") == (r"\frac12", None)
    assert gold_answer(" 72 ") == ("72", None)


@pytest.mark.parametrize("text", ["3", " 3 ", "[ 3 ]", "[3]", "$3$", r"\(3\)", r"\[ 3 \]", "3.", "$[3].$"])
def test_dressing_of_an_answer_is_taken_off(text: str) -> None:
    assert normalize_answer(text) == "3"


@pytest.mark.parametrize("text", ["[3,4]", "(3)", "[3;4]", "$3$ and $4$", "$18", "[]", "[[3]]"])
def test_what_carries_meaning_stays(text: str) -> None:
    assert normalize_answer(text) == text
