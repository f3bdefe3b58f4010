"""Limits of `${…}` in configurations, checked before anything is resolved.

OmegaConf resolves a value again for each reference to it, so forty levels of `a: ${b} ${b}` would never end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from archon.schema.errors import ConfigError

REFERENCES = 10_000
"""Maximum number of references to resolve; each takes some 50 µs."""
CHARACTERS = 2**24
"""Maximum number of characters after references are replaced: twice the size of the largest YAML file."""
NESTED = 20
"""Maximum number of `${…}` inside each other; the time to parse them grows with the square."""

# A key or the start of a key: ${a.b}, ${..a}, ${a.${b}}. The other form calls a function on a key: ${oc.select:a.b}.
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.[\w.]+\s*:\s*)?['\"]?(\.*)([^${}:,'\"\s]*)")
_BRACES = re.compile(r"\$?\{|\}")
_NAME = re.compile(r"[^.\[\]]+")


@dataclass(frozen=True)
class _Cost:
    """References and characters of a value after it is resolved."""

    references: int = 0
    characters: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.references + other.references, self.characters + other.characters)


def require_shallow_interpolations(text: str, source: str) -> None:
    """Raise ConfigError if a text has more than `NESTED` interpolations inside each other."""
    opened: list[str] = []
    depth = 0
    for brace in _BRACES.findall(text) if text.count("${") > NESTED else ():
        if brace != "}":
            opened.append(brace)
            depth += brace == "${"
        elif opened:
            depth -= opened.pop() == "${"
        if depth > NESTED:
            raise ConfigError(f"{source}: more than {NESTED} interpolations ${{…}} are inside each other")


def require_few_interpolations(values: Any, source: str) -> None:
    """Raise ConfigError if the interpolations of unresolved values expand to more than the limits of this module.

    Cycles count once, because OmegaConf reports them.

    Raises:
        RecursionError: too many interpolations refer to each other in a chain.
    """
    costs: dict[tuple[str, ...], _Cost] = {}

    def cost(path: tuple[str, ...]) -> _Cost:
        if path not in costs:
            costs[path] = _Cost()  # of a cycle
            value = _find(values, path)
            if isinstance(value, dict | list):
                keys = value if isinstance(value, dict) else range(len(value))
                costs[path] = sum((cost((*path, str(key))) for key in keys), _Cost())
            elif isinstance(value, str):
                referred = (_Cost(1) + cost(target) for target in _references(value, path))
                costs[path] = sum(referred, _Cost(0, len(value)))
        return costs[path]

    total = cost(())
    if total.references > REFERENCES:
        raise ConfigError(f"{source}: its interpolations ${{…}} expand to more than {REFERENCES:,} references")
    if total.references and total.characters > CHARACTERS:
        raise ConfigError(f"{source}: its interpolations ${{…}} expand to more than {CHARACTERS:,} characters")


def _references(text: str, path: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the paths that a text refers to; one dot is the section of the text, two are the section around it."""
    for dots, name in _REFERENCE.findall(text):
        section = path[: max(0, len(path) - len(dots))] if dots else ()
        if dots or name:
            yield (*section, *_NAME.findall(name))


def _find(values: Any, path: Sequence[str]) -> Any:
    """Return the value at a path; None if there is none."""
    for key in path:
        if isinstance(values, dict):
            values = next((value for name, value in values.items() if str(name) == key), None)
        elif isinstance(values, list) and key.isdecimal() and len(key) < 10 and int(key) < len(values):
            values = values[int(key)]
        else:
            return None
    return values
