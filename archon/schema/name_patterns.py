"""Regular expressions of module names, matched within a time limit.

LoRA configurations come from other people, and an expression can take exponential time. The expressions here are the
part of Python's that module names need: characters, sets, groups, alternatives, and repeated characters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Generic, TypeVar

import regex

from archon.schema.errors import ConfigError

MAX_SECONDS = 10.0
"""Most seconds that all matches of one expression, or of one `NamePatterns`, take together."""
_MAX_LENGTH = 1000
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LITERAL = re.compile(r"[\w.-]+")
Value = TypeVar("Value")


class NamePattern:
    """Regular expression of names. Raises ValueError for a malformed or refused one."""

    def __init__(self, text: str) -> None:
        self.text, self._seconds = text, [MAX_SECONDS]
        self._name, self._suffix = _checked(text), regex.compile(rf"(?:.*\.)?(?:{text})")

    def matches(self, name: str) -> bool:
        """Return whether it matches a whole name."""
        return self._matches(self._name, name)

    def matches_suffix(self, name: str) -> bool:
        """Return whether it matches a name, or the part after one of its dots, like the keys of PEFT's patterns."""
        return self._matches(self._suffix, name)

    def share_limit(self, other: NamePattern) -> None:
        """Count the time of both expressions together."""
        self._seconds = other._seconds

    def _matches(self, compiled: regex.Pattern[str], name: str) -> bool:
        start = time.monotonic()
        try:
            return compiled.fullmatch(name, timeout=max(self._seconds[0], 1e-3)) is not None
        except TimeoutError:
            raise ConfigError(
                f"the regular expression {self.text!r} of module names takes more than {MAX_SECONDS:g} s; use fewer "
                "alternatives and repetitions"
            ) from None
        finally:
            self._seconds[0] -= time.monotonic() - start


class NamePatterns(Generic[Value]):
    """Values by module name: PEFT's rank_pattern and alpha_pattern.

    A key applies to the modules with a matching name, or with a matching part after a dot; the first such key counts.
    Dots are literal in a key without other special characters.

    Raises:
        ValueError: a key is no pattern, or the keys with special characters are too long together.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._literals: dict[str, tuple[int, Value]] = {}
        self._patterns: list[tuple[int, NamePattern, Value]] = []
        for order, (key, value) in enumerate(values.items()):
            if _LITERAL.fullmatch(key):
                self._literals[key] = (order, value)
                continue
            try:
                pattern = NamePattern(key)
            except ValueError as error:
                raise ValueError(f"{key!r}, which is no regular expression of names: {error}") from None
            self._patterns.append((order, pattern, value))
            pattern.share_limit(self._patterns[0][1])
            if sum(len(pattern.text) for _, pattern, _ in self._patterns) > _MAX_LENGTH:
                raise ValueError(f"regular expressions of more than {_MAX_LENGTH} characters together")

    def first(self, name: str, default: Value) -> Value:
        """Return the value of the first key that applies to a module; `default` without one."""
        matches = [self._literals[suffix] for suffix in name_suffixes(name) if suffix in self._literals]
        patterns = ((order, value) for order, pattern, value in self._patterns if pattern.matches_suffix(name))
        matches += [next(patterns, (len(self._literals) + len(self._patterns), default))]
        return min(matches, key=lambda item: item[0])[1]


def name_suffixes(name: str) -> list[str]:
    """Return a module's name and the part after each of its dots: the names that select it as a target."""
    return [name] + [name[place + 1 :] for place, character in enumerate(name) if character == "."]


def _checked(text: str) -> regex.Pattern[str]:
    """Compile an expression; raise ValueError if it is malformed, or if it is refused."""
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"it has {len(text)} characters; expected at most {_MAX_LENGTH}")
    for sign in re.findall(r"\\(.)", text):
        if sign.isalnum() and sign not in "dDwWsS":
            raise ValueError(f"\\{sign} is refused; expected one of \\d \\w \\s \\D \\W \\S, or an escaped sign")
    if "[:" in text:
        raise ValueError("[: starts a POSIX class, which is refused")
    plain = _ATOM.sub("a", text)  # a set or an escaped sign is one character
    if re.search(r"\(\?(?!:)", plain):
        raise ValueError("extensions (?…) are refused")
    if re.search(r"\)[*+{]", plain):
        raise ValueError("it repeats a group, which is refused, since such an expression can take forever")
    if re.search(r"\{(?!(?:\d{1,3}(?:,\d{0,3})?|,\d{1,3})\})", plain):
        raise ValueError("it has a { that is no number of repetitions up to 999")
    try:
        re.compile(text)
        return regex.compile(text)
    except (re.error, regex.error, RecursionError) as error:
        raise ValueError(str(error)) from None
