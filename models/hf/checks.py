"""Checks of config values and model arguments."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

from archon.schema.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def reject_field(name: str, value: Any, expected: str) -> NoReturn:
    """Raise ConfigError with a field, its value and the expected value."""
    raise ConfigError(f"config field {name!r} is {value!r}; {expected}", field=name)


def check_kind(name: str, value: Any, kind: type) -> Any:
    """Return `value` as `kind`; an integer is accepted as a float, a bool is not a number.

    Another type and a value that is not finite raise ConfigError, which names the field.
    """
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)):
        with suppress(OverflowError):  # an integer too large for a float
            converted = kind(value)
            if kind is not float or abs(converted) < float("inf"):
                return converted
    reject_field(name, value, f"expected {'a number' if kind is float else 'type ' + kind.__name__}")
