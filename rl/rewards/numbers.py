r"""Numbers as models write them: with currencies, units, bold, LaTeX, thousands separators, or as `x = 72`."""

from __future__ import annotations

import re
from fractions import Fraction

from archon.rl.rewards.extract import normalize_answer

_MAX_LENGTH = 200  # characters; int() refuses 4,300 digits

_CURRENCY = "[¤$€£¥₹]"  # ¤ stands for LaTeX's escaped dollar
_DECIMAL = re.compile(
    rf"(?P<sign>[+-]?)\s*{_CURRENCY}?\s*(?P<value>(?:[0-9]{{1,3}}(?:[, ][0-9]{{3}})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
)
_RATIO = re.compile(r"(?P<sign>[+-]?)\s*(?:\\[dt]?frac\{(?P<a>[^{}]*)\}\{(?P<b>[^{}]*)\}|(?P<c>[^/]*)/(?P<d>[^/]*))")
_MIXED = re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>[0-9]+)\s*(?P<part>\\[dt]?frac\{[0-9]+\}\{[0-9]+\}| [0-9]+/[0-9]+)")
_SCIENTIFIC = re.compile(
    r"(?P<decimal>.*?)\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*(?P<a>[+-]?[0-9]{1,2})\s*\}|(?P<b>[0-9]))"
)

_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt)|boldsymbol|bm|mbox|emph|underline|boxed)\s*\{([^{}]*)\}"
)
_LABEL = re.compile(r"[A-Za-z][A-Za-z ]*[=:]\s*(?=\S)")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degree")
_UNIT_EXPONENT = re.compile(r"(?<=[A-Za-z])\s*(?:\^\s*(?:[23]|\{[23]\})|[²³])")
_NUMBER_AND_UNIT = re.compile(rf"(?P<number>.*(?:[0-9]\.?|\}}))\s*(?:\\?%|{_CURRENCY})?\s*/?\s*(?P<unit>.*)", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z]+(?:[ /.'-]+[A-Za-z]+)*\.?")
_ONE_LETTER_UNITS = frozenset("ghlmsCFL")
# Words that change the number before them, or do not belong to a unit.
_NO_UNIT = re.compile(
    r"(?:(?:hundred|thousand|(?:m|b|tr|quadr)illion|dozen|ten)(?:th)?|half|halve|third|quarter|fifth|sixth|eighth"
    r"|lakh|crore|gross|score|pair|couple|mn|bn|mil)s?"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|point"
    r"|and|or|to|plus|minus|times|over|than|not|no|never|but|is|was|if|through|squared|cubed|power|negative|below"
    r"|wrong|incorrect|false|pi|sqrt|log|mod|infinity",
    re.IGNORECASE,
)


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact value of a number, or None.

    Accepts 1,000, 3.0, [ 3 ], $18, 20% (as 20), \frac{7}{2}, 3\frac{1}{2}, 1.5 \times 10^3, **72**, \text{72}, x = 72,
    and 72 with a unit. A text with another number, or with words that change the number (72 thousand, 72 and a half),
    is None.
    """
    if len(text) > _MAX_LENGTH:
        return None
    # 1. Remove marks around the number
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\$", "¤")
    for space in ("\\quad", "\\(", "\\)"):
        text = text.replace(space, " ")
    previous = None
    while text != previous:
        previous = text
        text = normalize_answer(_WRAPPER.sub(r" \1 ", text)).strip("*_`\"' ")
    if label := _LABEL.match(text):
        text = text[label.end() :].strip("*_` ")
    # 2. Separate the unit
    text = _UNIT_EXPONENT.sub("", _DEGREES.sub(" ", text))
    parts = _NUMBER_AND_UNIT.fullmatch(text)
    if parts is None or not _is_unit(parts["unit"].strip(), has_currency=re.search(_CURRENCY, text) is not None):
        return None
    # 3. Read the number
    number = parts["number"].strip()
    if scientific := _SCIENTIFIC.fullmatch(number):
        decimal, exponent = _decimal(scientific["decimal"]), int(scientific["a"] or scientific["b"])
        return None if decimal is None else decimal * Fraction(10) ** exponent
    if mixed := _MIXED.fullmatch(number):
        part = _ratio(mixed["part"].strip())
        return None if part is None else _signed(mixed["sign"], int(mixed["whole"]) + part)
    value = _decimal(number)
    return _ratio(number) if value is None else value


def _is_unit(unit: str, has_currency: bool) -> bool:
    if not unit:
        return True
    words = re.split(r"[ /.'-]+", unit.rstrip(".")) if _WORDS.fullmatch(unit) else []
    return 1 <= len(words) <= 6 and all(
        (not has_currency and word in _ONE_LETTER_UNITS) or (place > 0 and word in ("a", "s"))
        if len(word) == 1
        else _NO_UNIT.fullmatch(word) is None
        for place, word in enumerate(words)
    )


def _decimal(text: str) -> Fraction | None:
    decimal = _DECIMAL.fullmatch(text)
    return decimal and _signed(decimal["sign"], Fraction(re.sub("[, ]", "", decimal["value"])))


def _ratio(text: str) -> Fraction | None:
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    numerator, denominator = (_decimal((ratio[a] or ratio[b] or "").strip()) for a, b in (("a", "c"), ("b", "d")))
    return _signed(ratio["sign"], numerator / denominator) if numerator is not None and denominator else None


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
