"""Regular expressions of modules' names, matched in time proportional to their length.

Adapters come from other people, and Python's `re` can take forever on an expression made for it. The expressions here
are the part of Python's that names of modules need: characters, sets, groups, alternatives, and repeated characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import or_
from typing import Generic, TypeVar

_Step = Callable[["_Name", int], int]
"""From a name, and the places in it where a part of the expression may begin, to those where it may end. Places are the
bits of a number, the lowest before the first character."""
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|\(\?:|.", re.DOTALL)
_CLASSES = frozenset("dDwWsS")
_LITERAL = re.compile(r"[\w.-]+")
_MAX_LENGTH = 1000
_MAX_TOTAL = 1000
_MAX_DEPTH = 20
Value = TypeVar("Value")


@dataclass(frozen=True)
class NamePattern:
    """A regular expression of names. Raises ValueError, with what is wrong, for one that is malformed or refused."""

    text: str

    def __post_init__(self) -> None:
        parser = _Parser(self.text)
        object.__setattr__(self, "_step", parser.alternatives(0))
        if parser.tokens:
            raise ValueError("unbalanced parenthesis")

    def matches(self, name: str) -> bool:
        """Return whether it matches a whole name."""
        return self._ends(name, 1)

    def matches_suffix(self, name: str) -> bool:
        """Return whether it matches a name, or what follows one of the name's dots, as keys of PEFT's patterns do."""
        return self._ends(name, 1 | _Name(name).places.get(".", 0) << 1)

    def _ends(self, name: str, starts: int) -> bool:
        step: _Step = vars(self)["_step"]
        return bool(step(_Name(name), starts) >> len(name))


class _Name:
    """A name, and the places before each of its characters, by character."""

    def __init__(self, text: str) -> None:
        self.length = len(text)
        self.places: dict[str, int] = {}
        for place, character in enumerate(text):
            self.places[character] = self.places.get(character, 0) | 1 << place


class NamePatterns(Generic[Value]):
    """Values by the names of modules: PEFT's rank_pattern and alpha_pattern.

    A key means the modules whose names it matches, or what follows a dot of theirs; the first such key counts. Dots of
    a key without other signs stand for themselves.

    Raises ValueError, which names the key, for one that is no pattern, and where the keys that are more than names are
    too long together.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._literals: dict[str, tuple[int, Value]] = {}
        self._patterns: list[tuple[int, NamePattern, Value]] = []
        length = 0
        for order, (key, value) in enumerate(values.items()):
            if _LITERAL.fullmatch(key):
                self._literals[key] = (order, value)
                continue
            try:
                self._patterns.append((order, NamePattern(key), value))
            except ValueError as error:
                raise ValueError(f"{key!r}, which is no regular expression of names: {error}") from None
            length += len(key)
            if length > _MAX_TOTAL:
                raise ValueError(f"regular expressions of more than {_MAX_TOTAL} characters together")

    def first(self, name: str, default: Value) -> Value:
        """Return the value of the first key that means a module; `default` where none does."""
        found = [self._literals[end] for end in name_suffixes(name) if end in self._literals]
        patterns = ((order, value) for order, pattern, value in self._patterns if pattern.matches_suffix(name))
        found += [next(patterns, (len(self._literals) + len(self._patterns), default))]
        return min(found, key=lambda item: item[0])[1]


def name_suffixes(name: str) -> list[str]:
    """Return a module's name and what follows each of its dots: what names of targets may be."""
    return [name] + [name[place + 1 :] for place, character in enumerate(name) if character == "."]


class _Parser:
    """Reads an expression from the left; `tokens` are what is left of it, the next one last."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"it has {len(text)} characters; expected at most {_MAX_LENGTH}")
        self.tokens = _TOKEN.findall(text)[::-1]

    def next_is(self, *expected: str) -> bool:
        return bool(self.tokens) and self.tokens[-1] in expected

    def alternatives(self, depth: int) -> _Step:
        if depth > _MAX_DEPTH:
            raise ValueError(f"its groups are nested more than {_MAX_DEPTH} deep")
        branches = [self._sequence(depth)]
        while self.next_is("|"):
            self.tokens.pop()
            branches.append(self._sequence(depth))
        return lambda name, starts: reduce(or_, [branch(name, starts) for branch in branches])

    def _sequence(self, depth: int) -> _Step:
        steps: list[_Step] = []
        while self.tokens and not self.next_is("|", ")"):
            steps.append(self._repeated(self.tokens.pop(), depth))

        return lambda name, starts: reduce(lambda places, step: step(name, places), steps, starts)

    def _repeated(self, token: str, depth: int) -> _Step:
        if token in ("^", "$"):
            return lambda name, starts: starts & (1 if token == "^" else 1 << name.length)
        is_group = token in ("(", "(?:")
        step = self._group(depth) if is_group else None
        places = _char_positions(token) if not is_group else None
        counts = self._quantifier()
        if step is None:
            assert places is not None
            return partial(_repeat, places, *counts)
        if counts == (0, 1):
            return lambda name, starts: starts | step(name, starts)
        if counts != (1, 1):
            raise ValueError("it repeats a group, which is refused, since such an expression can take forever")
        return step

    def _quantifier(self) -> tuple[int, int | None]:
        """Return how often what was read is repeated, at least and at most."""
        if not (
            self.next_is("*", "+", "?") or (self.tokens and len(self.tokens[-1]) > 2 and self.tokens[-1][0] == "{")
        ):
            return 1, 1
        counts = _counts(self.tokens.pop())
        if self.next_is("?"):  # a lazy one matches the same names
            self.tokens.pop()
        if self.next_is("*", "+", "?"):
            raise ValueError("multiple repeat")
        return counts

    def _group(self, depth: int) -> _Step:
        if self.next_is("?"):
            raise ValueError("extensions (?…) are refused")
        step = self.alternatives(depth + 1)
        if not self.next_is(")"):
            raise ValueError("missing ), unterminated subpattern")
        self.tokens.pop()
        return step


def _counts(token: str) -> tuple[int, int | None]:
    """Return how often a quantifier repeats: at least, and at most."""
    if token in "*+?":
        return int(token == "+"), 1 if token == "?" else None
    low, comma, high = token[1:-1].partition(",")
    if (not low and not high) or max(len(low), len(high)) > 4:
        raise ValueError(f"{token} is no number of repetitions up to 9999")
    least = int(low or 0)
    most = (int(high) if high else None) if comma else least
    if most is not None and most < least:
        raise ValueError("min repeat greater than max repeat")
    return least, most


def _repeat(char_positions: Callable[[_Name], int], least: int, most: int | None, name: _Name, starts: int) -> int:
    """Return where `least` to `most` characters, each at one of these places, may end."""
    places = char_positions(name)
    for _ in range(min(least, name.length + 1)):
        starts = (starts & places) << 1
    if most is None:
        # A sum carries each start to the end of its run of places (Myers 1999, doi:10.1145/316542.316550).
        inside = starts & places
        return starts | ((inside + places) ^ places) | inside
    ends = starts
    for _ in range(min(most - least, name.length)):
        starts = (starts & places) << 1
        ends |= starts
    return ends


@lru_cache(maxsize=256)
def _char_positions(token: str) -> Callable[[_Name], int]:
    """Return what finds the places in a name before a character, or before one of a set."""
    if token in ("*", "+", "?", ")"):
        raise ValueError("nothing to repeat" if token != ")" else "unbalanced parenthesis")
    if token in ("[", "\\"):
        raise ValueError("unterminated character set" if token == "[" else "bad escape at the end")
    if token[0] == "\\" and token[1].isalnum() and token[1] not in _CLASSES:
        raise ValueError(f"{token} is refused; expected one of \\d \\w \\s \\D \\W \\S, or an escaped sign")
    try:
        one = re.compile(token)
    except re.error as error:
        raise ValueError(str(error)) from None

    @lru_cache(maxsize=128)
    def has(character: str) -> bool:
        return one.fullmatch(character) is not None

    @lru_cache(maxsize=1)
    def find(name: _Name) -> int:
        return sum(places for character, places in name.places.items() if has(character))

    return find
