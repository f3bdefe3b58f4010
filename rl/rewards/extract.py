r"""Answer extraction, shared by all rewards.

It takes the last `\boxed{…}` (with nested braces), else the dataset's form (`#### x` for gsm8k, `[x]` for geometry3k
and clevr_count_70k). It never takes the last number of the text, which may be an unfinished thought.
"""

from __future__ import annotations

import re

# Answer forms of datasets: the pattern's first group is the answer. The last match counts.
ANSWER_FORMS: dict[str, re.Pattern[str]] = {
    "gsm8k": re.compile(r"^[ \t]*(?:\*\*|__)?####[ \t]*(\S.*?)[ \t]*$", re.MULTILINE),
    "brackets": re.compile(r"\[([^\[\]\n]*[^\[\]\s][^\[\]\n]*)\]"),
}
GOLD_FORMS = ("gsm8k",)
"""Forms of a gold answer; brackets in a gold answer may be a list."""

_BOXED = re.compile(r"\\boxed\s*\{")
_SPACING = re.compile(r"(?:\\[,;: ]|~|\s)+")
_SINGLE_BRACKETS = re.compile(r"\[([^\[\],;]*)\]")


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`; None if there is none or the last one is not closed."""
    openings = list(_BOXED.finditer(text))
    if not openings:
        return None
    start = openings[-1].end()
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # skips an escaped brace, as in \{1, 2\}
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position].strip()
        position += 1
    return None


def extract_answer(text: str, form: str | None = None) -> str | None:
    r"""Return the answer stated in a completion, or None.

    `form` is a key of `ANSWER_FORMS`, accepted without `\boxed{…}`.
    """
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    if form is None:
        return None
    matches = ANSWER_FORMS[form].findall(text)
    return matches[-1] if matches else None


def gold_answer(answer: str) -> tuple[str, str | None]:
    """Return a dataset's gold answer without its solution, and the answer form or None.

    A worked solution that ends in `#### 72` becomes ("72", "gsm8k"); a bare "72" becomes ("72", None).
    """
    for form in GOLD_FORMS:
        matches = ANSWER_FORMS[form].findall(answer)
        if matches:
            return matches[-1], form
    boxed = boxed_answer(answer)
    return (answer.strip() if boxed is None else boxed), None


def normalize_answer(answer: str) -> str:
    r"""Remove spaces, `$…$`, `\(…\)`, a full stop and brackets around one element."""
    text = _SPACING.sub(" ", answer.replace("\\!", "").replace("{,}", ",")).strip()
    previous = None
    while text != previous:
        previous = text
        text = text.removesuffix(".").strip()
        for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inner = text[len(opening) : -len(closing)]
            if len(text) > 2 * len(closing) and text == f"{opening}{inner}{closing}" and opening not in inner:
                text = inner.strip()
        bracketed = _SINGLE_BRACKETS.fullmatch(text)
        if bracketed and bracketed[1].strip():
            text = bracketed[1].strip()
    return text
