"""Names of environments from other packages, for example `reasoning_gym:leg_counting?max_animals=3`."""

from __future__ import annotations

import difflib
import importlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal
from urllib.parse import parse_qsl

from archon.schema.errors import ConfigError

FAMILIES = ("openenv", "reasoning_gym", "textarena")
_ADAPTERS: dict[str, Callable[[], ModuleType]] = {}
_NAME = re.compile(rf"({'|'.join(FAMILIES)})(?::(.*))?", re.DOTALL)


def register_environment(family: str, load: Callable[[], ModuleType]) -> None:
    """Register the module of an environment family: a function that imports it."""
    _ADAPTERS[family] = load


@dataclass(frozen=True)
class EnvironmentName:
    """A parsed name: `family:task?option=value&…`. Values are JSON, or text if they do not parse."""

    text: str
    family: str
    task: str
    options: dict[str, Any]

    def require_task(self, known: Iterable[str]) -> None:
        """Raise ConfigError with the nearest of the `known` tasks if the family has no such task."""
        known = sorted(known)
        if self.task in known:
            return
        near = difflib.get_close_matches(self.task, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        problem = f"{self.family} has no task {self.task!r}; {hint}" if self.task else f"name a task: {hint}"
        raise ConfigError(f"{self.text}: {problem}")

    def require_options(self, known: Iterable[str], what: str) -> None:
        """Raise ConfigError for an unknown option of `what`, with the nearest of the `known` ones."""
        known = sorted(known)
        for option in self.options:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
                raise ConfigError(f"{self.text}: {what} has no option {option!r}; {hint}")

    def integer_option(self, option: str, default: int, least: int = 1) -> int:
        """Return the value of an option that is a whole number of at least `least`."""
        value = self.options.get(option, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self.text}: {option} is {value!r}, expected a whole number of at least {least}")
        return value


def parse_environment(text: str) -> EnvironmentName | None:
    """Return the parsed name of an environment; None for any other text. Raises ConfigError for a malformed query."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    task, mark, query = (match[2] or "").partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if mark else []
    except ValueError as error:
        raise ConfigError(f"{text}: after the question mark expected option=value&option=value ({error})") from None
    options = {option: _value(value) for option, value in pairs}
    if len(options) < len(pairs):
        raise ConfigError(f"{text}: an option is there twice")
    return EnvironmentName(text, match[1], task, options)


def environment_function(
    name: EnvironmentName, part: Literal["rows", "reward", "make_environment"]
) -> Callable[..., Any]:
    """Return a function of the family's module.

    `rows(name, split, seed)` returns rows, `reward(name)` a reward function, and `make_environment(name)` a function
    that makes the environment of an episode. They raise ConfigError for unsupported names.
    """
    if name.family not in _ADAPTERS:
        raise ConfigError(f"{name.text}: environment family {name.family} is not registered; import archon.rl first")
    function: Callable[..., Any] = getattr(_ADAPTERS[name.family](), part)
    return function


def import_environment(name: EnvironmentName, module: str) -> Any:
    """Return a module of the family's package; raise ConfigError with the name of the extra if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        raise ConfigError(
            f"{name.text} needs the package {module.partition('.')[0]}, and {missing}; install archon's extra `envs`: "
            "pip install 'archon-engine[envs]'"
        ) from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
