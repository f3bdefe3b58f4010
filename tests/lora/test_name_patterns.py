"""Patterns of module names match like Python's `re` in PEFT, within a time limit."""

from __future__ import annotations

import random
import re
import time

import pytest

from archon.schema import name_patterns
from archon.schema.errors import ConfigError
from archon.schema.name_patterns import NamePattern, NamePatterns

pytestmark = pytest.mark.unsampled

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.experts.3.gate_proj", "q_proj", "aab.ba", "a", ""]
ATOMS = [
    "a",
    "b",
    ".",
    r"\.",
    "q_proj",
    "layers",
    r"\d",
    "[0-9]",
    "[^.]",
    "[ab]",
    "mlp",
    "^",
    "$",
    ".*",
    r"\d+",
    "(",
    "(?:",
]
REPEATS = ["", "", "*", "+", "?", "{1,2}", "{2}", "{0,}", "*?"]


def drawn(rng: random.Random, depth: int = 0) -> str:
    text = ""
    for _ in range(rng.randint(0, 4)):
        atom = rng.choice(ATOMS)
        if atom in ("(", "(?:"):
            text += (
                f"{atom}{drawn(rng, depth + 1)}|{drawn(rng, depth + 1)}){rng.choice(['', '?'])}" if depth < 3 else "a"
            )
        else:
            text += atom + (rng.choice(REPEATS) if atom in ("a", "b", ".", "[0-9]", "[^.]", "[ab]") else "")
    return text


def test_patterns_match_what_python_says() -> None:
    rng, matches = random.Random(0), 0
    for _ in range(2000):
        text = drawn(rng)
        pattern = NamePattern(text)
        for name in NAMES:
            assert pattern.matches(name) == bool(re.fullmatch(text, name)), (text, name)
            expected = bool(re.fullmatch(rf"(.*\.)?({text})", name))
            assert pattern.matches_suffix(name) == expected, (text, name)
            matches += expected
    assert 600 < matches < 11000


FOREVER = {
    "groups": "(a?|a?)" * 120 + "c",
    "options": "a?" * 300 + "a" * 300,
    "repetitions": ".*" * 400 + "c",
    "counts": "a{0,99}" * 120 + "c",
    "alternatives": "(a|a)" * 150 + "c",
}


@pytest.mark.parametrize("text", FOREVER.values(), ids=FOREVER)
def test_no_pattern_takes_forever(text: str) -> None:
    begun = time.process_time()
    assert not NamePattern(text).matches_suffix("a" * 100)
    assert time.process_time() - begun < 0.5


def test_matches_stop_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "MAX_SECONDS", 0.2)
    patterns = NamePatterns({"(ab?|a?b)(a|ab|b?)" * 25 + "[cd]": 1, ".*": 2})
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"takes more than 0\.2 s; use fewer alternatives"):
        [patterns.first("ab" * length + "e", 0) for length in range(1000)]
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("(a+)+b", "repeats a group, which is refused, since such an expression can take forever"),
        ("(a|b){2}", "repeats a group"),
        ("a**", "multiple repeat"),
        ("*a", "nothing to repeat"),
        ("a{3,2}", "min repeat greater than max repeat"),
        ("a{99999}", "no number of repetitions up to 999"),
        ("(", r"missing \), unterminated subpattern"),
        ("a)", "unbalanced parenthesis"),
        ("[a", "unterminated character set"),
        ("[z-a]", "bad character range z-a"),
        ("\\", "bad escape"),
        (r"(a)\1", r"\\1 is refused; expected one of"),
        ("(?=a)", "extensions .* are refused"),
        ("[[:alpha:]]", "POSIX class, which is refused"),
        ("(?i)a", "extensions .* are refused"),
        ("a{e<=1}", "no number of repetitions"),
        (r"[\]a](b*)+", "repeats a group"),
        ("a" * 1001, "it has 1001 characters; expected at most 1000"),
        ("(" * 400 + ")" * 400, "recursion"),
    ],
)
def test_what_is_no_pattern_or_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        NamePattern(text)


def test_the_first_key_that_means_a_module_counts() -> None:
    values = NamePatterns({r"layers\.[01]\..*": 1, "q_proj": 2, "layers.3.mlp": 3, ".*_proj": 4, "k_proj": 5})
    found = {name: values.first(name, 0) for name in ("layers.0.q_proj", "layers.2.q_proj", "k_proj", "x.layers.3.mlp")}
    assert found == {"layers.0.q_proj": 1, "layers.2.q_proj": 2, "k_proj": 4, "x.layers.3.mlp": 3}
    assert values.first("xlayers.3.mlp", 0) == values.first("layers.3.mlp.gate", 0) == 0


def test_many_long_patterns_are_refused_and_many_names_are_not() -> None:
    NamePatterns({f"layers.{layer}.q_proj": 1 for layer in range(100_000)})
    with pytest.raises(ValueError, match="regular expressions of more than 1000 characters together"):
        NamePatterns({f".*{layer}.*": 1 for layer in range(1000)})
